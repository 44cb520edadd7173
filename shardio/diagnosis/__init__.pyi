from .doctor import Diagnosis as Diagnosis, doctor as doctor
from .remedies import Advice as Advice
