from .data_loader import DataLoader as DataLoader
from .executor import LoaderStats as LoaderStats
