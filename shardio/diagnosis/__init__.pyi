from .doctor import Diagnosis as Diagnosis, doctor as doctor
from .rates import Advice as Advice
