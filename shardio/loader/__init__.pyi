from .data_loader import DataLoader as DataLoader
from .statistics import LoaderStats as LoaderStats
