from collections.abc import Sequence
from typing import TypedDict

_Coord = tuple[int, int, int]
_Link = tuple[_Coord, _Coord]
_Traffic = Sequence[tuple[int, str, float]]

class Component(TypedDict):
    physical: str
    size: int
    stride: int
    wiring: str

class LogicalAxis(TypedDict):
    size: int
    is_ring: bool
    components: list[Component]

class Dimension(TypedDict):
    size: int
    wiring: str
    bandwidth: float
    startup: float
    hop: float

class ChipCandidate(TypedDict):
    algorithm: str
    seconds: float
    latency: float
    formula: bool

class ChipExplanation(TypedDict):
    chosen: str | None
    why: str
    candidates: list[ChipCandidate]

class HostCandidate(TypedDict):
    algorithm: str
    seconds: float | None
    formula: bool
    excluded: str | None

class HostExplanation(TypedDict):
    chosen: str
    forced: bool
    shared_memory: bool
    why: str
    candidates: list[HostCandidate]

class Process(TypedDict):
    index: int
    ranks: list[int]
    slice: int
    host: int
    local_index: int
    visible_chips: list[int]
    coords: list[_Coord]
    environment: dict[str, str]

class Topology:
    def __new__(
        cls,
        name: str,
        *,
        num_slices: int | None = None,
        wrap: tuple[bool, bool, bool] | None = None,
        chips_per_host: _Coord | None = None,
        devices_per_chip: int | None = None,
    ) -> Topology: ...
    @staticmethod
    def from_labels(accelerator: str, topology: str, num_slices: int = 1) -> Topology: ...
    @property
    def name(self) -> str: ...
    @property
    def libtpu_name(self) -> str: ...
    @property
    def generation(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def accelerator_type(self) -> str: ...
    @property
    def shape(self) -> _Coord: ...
    @property
    def wrap(self) -> tuple[bool, bool, bool]: ...
    @property
    def twisted(self) -> bool: ...
    @property
    def num_slices(self) -> int: ...
    @property
    def chips(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def device_count(self) -> int: ...
    @property
    def devices_per_chip(self) -> int: ...
    @property
    def host_bounds(self) -> _Coord: ...
    @property
    def chips_per_host(self) -> _Coord: ...
    @property
    def link_bandwidth(self) -> float: ...
    @property
    def memory_per_device(self) -> int: ...
    @property
    def dcn_bandwidth_per_host(self) -> float: ...
    def devices(self) -> list[tuple[int, int, int, int, int, int, int]]: ...
    def bisection_bandwidth(
        self, *, dead_links: Sequence[_Link] = (), dead_chips: Sequence[_Coord] = ()
    ) -> float: ...
    def route(
        self,
        start: _Coord,
        end: _Coord,
        *,
        dead_links: Sequence[_Link] = (),
        dead_chips: Sequence[_Coord] = (),
    ) -> list[_Coord]: ...
    def rings(
        self, *, dead_links: Sequence[_Link] = (), dead_chips: Sequence[_Coord] = ()
    ) -> list[list[_Coord]]: ...
    def place(
        self, shape: Sequence[int], traffic: _Traffic, dcn_shape: Sequence[int] | None = None
    ) -> Placement: ...
    def evaluate(
        self, shape: Sequence[int], ranks: Sequence[int], traffic: _Traffic
    ) -> Placement: ...
    def costs(
        self, ranks: Sequence[int], collective: str, nbytes: float
    ) -> list[tuple[str, float]]: ...
    def explain_chips(
        self, ranks: Sequence[int], collective: str, nbytes: float
    ) -> ChipExplanation: ...
    def explain_hosts(
        self,
        ranks: Sequence[int],
        collective: str,
        nbytes: int,
        *,
        op: str = "SUM",
        dtype: str = "float32",
        algorithm: str | None = None,
    ) -> HostExplanation: ...
    def group(self, ranks: Sequence[int]) -> list[Dimension]: ...
    def launch(
        self,
        hosts: Sequence[str],
        *,
        processes: str = "per_chip",
        port: int | None = None,
        megascale_port: int | None = None,
    ) -> list[Process]: ...
    def text(self) -> str: ...
    def svg(self) -> str: ...

class Placement:
    @property
    def shape(self) -> list[int]: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def device_ids(self) -> list[int]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def axes(self) -> list[LogicalAxis]: ...
    @property
    def times(self) -> list[tuple[int, str, float, float]]: ...
    def costs(self, axis: int, collective: str, nbytes: float) -> list[tuple[str, float]]: ...
    def text(self, names: Sequence[str]) -> str: ...
    def svg(self, names: Sequence[str]) -> str: ...

def legal_topologies(generation: str) -> list[str]: ...
def default_traffic(names: Sequence[str]) -> list[tuple[int, str, float]]: ...
