"""The base class of datasets and samplers that give each rank its own samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.datasets.split_once import refuse_second_split
from shardio.world import CarriedWorld, World, choose_world, find_data_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Ranked:
    """The base class of datasets and samplers that split their samples over ranks.

    Attributes:
        gives_order: Whether a shardio.DataLoader over it has its order. Frameworks do not split such a loader again.
        has_loader: Whether it belongs to such a loader.
    """

    gives_order = False

    def __init__(
        self,
        *,
        rank: int | None,
        world_size: int | None,
        mesh: DeviceMesh | None,
        group: ProcessGroup | None,
    ) -> None:
        self._world = choose_world(rank, world_size, mesh=mesh, group=group)
        self._carried_world: CarriedWorld | None = None
        self.has_loader = False

    @property
    def rank(self) -> int:
        """The current rank of this process."""
        return self.world().rank

    @property
    def world_size(self) -> int:
        """The current number of ranks."""
        return self.world().world_size

    def world(self) -> World:
        """Return the rank and world size that the user set, or else the current ones.

        Raises:
            RuntimeError: If the user set none, and a mesh makes it unclear which ranks read different samples.
        """
        return self._world or find_data_world(carried=self._carried_world)

    def check_split_once(self) -> World:
        """Check that no caller splits the samples over ranks again, and return the world.

        Raises:
            RuntimeError: If a caller does.
        """
        world = self.world()
        refuse_second_split(self, world, has_loader=self.has_loader, gives_order=self.gives_order)
        return world
