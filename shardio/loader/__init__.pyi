from .data_loader import DataLoader as DataLoader
from .stats import LoaderStats as LoaderStats
