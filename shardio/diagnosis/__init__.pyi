from .doctor import Diagnosis as Diagnosis, doctor as doctor
from .evidence import Advice as Advice
