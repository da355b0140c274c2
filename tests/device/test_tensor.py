"""Tensors on the device: making, copying, viewing and changing them, against the CPU."""

import copy
import io
import pickle
import warnings

import numpy
import pytest
import torch

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def sample(shape=(3, 4), dtype=torch.float32):
    """A CPU tensor with values of all signs."""
    values = torch.arange(-5, -5 + torch.Size(shape).numel()).reshape(shape)
    if dtype.is_complex:
        return torch.complex(values.double(), -values.double() / 2).to(dtype)
    return values.to(dtype)


def same(on_device, expected):
    """Whether a tensor has the values, type, sizes and strides of one on the CPU."""
    assert on_device.device == torch.device("tpu", 0)
    assert on_device.stride() == expected.stride()
    torch.testing.assert_close(on_device.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.zeros(2, 3, device=device),
        lambda device: torch.ones(2, 3, device=device, dtype=torch.int64),
        lambda device: torch.full((2,), 7.5, device=device),
        lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
        lambda device: torch.tensor(3.5, device=device),
        lambda device: torch.empty(0, 4, device=device),
        lambda device: torch.zeros(2, 3, 4, 5, device=device).to(
            memory_format=torch.channels_last
        ),
        lambda device: torch.arange(7, device=device),
        lambda device: torch.arange(1, 2, 0.25, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
    ],
)
def test_made_as_on_the_cpu(make):
    same(make("tpu"), make("cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_there_and_back(dtype):
    x = sample(dtype=dtype)
    for source in (
        x,
        x.t(),
        x[:, 1:3],
        x[::2],
        x[1, 2],
        x.flatten().as_strided((2, 2), (1, 5), 2),
    ):
        there = source.to("tpu")
        same(there, source.clone())
        same(there.clone(), source.clone())
        assert there.dtype == dtype


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16, torch.bool])
def test_types_are_converted(dtype, to):
    x = sample(dtype=dtype)
    same(x.to("tpu").to(to), x.to(to))
    same(x.to("tpu", to), x.to(to))
    assert torch.equal(x.to("tpu").to("cpu", to), x.to(to))


VIEWS = {
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[1],
    "column": lambda x: x[:, 2],
    "reshape": lambda x: x.view(2, 6),
    "flatten": lambda x: x.flatten(),
    "as_strided": lambda x: x.as_strided((2, 3), (1, 4), 1),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "split": lambda x: x.split(2, 1)[1],
    "permuted slice": lambda x: x[:, 1:].t()[::2],
    "bytes": lambda x: x.view(torch.uint8),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_read_and_write_their_base(view):
    base = sample()
    there = base.to("tpu")
    seen = view(there)
    assert seen.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
    same(seen, view(base))
    seen.fill_(3)
    view(base).fill_(3)
    same(there, base)
    there.add_(1)
    base.add_(1)
    same(seen, view(base))
    seen.copy_(torch.ones_like(view(base)))
    view(base).copy_(torch.ones_like(view(base)))
    same(there, base)


def test_complex_views():
    x = sample(dtype=torch.complex64)
    there = x.to("tpu")
    same(torch.view_as_real(there), torch.view_as_real(x))
    assert torch.equal(there.conj().cpu(), x.conj().resolve_conj())
    there.copy_(x.conj().to("tpu").conj())
    same(there, x)
    there.imag.zero_()
    assert torch.equal(there.cpu().real, x.real)
    assert not there.cpu().imag.any()


def test_a_copy_shares_nothing_that_is_written():
    x = sample().to("tpu")
    y = x.clone()
    held = torch.tpu.memory_allocated()
    y.add_(1)
    assert torch.tpu.memory_allocated() == held + x.nbytes
    same(x, sample())
    same(y, sample() + 1)
    z = y.clone()
    y.mul_(2)
    same(z, sample() + 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.copy_(torch.arange(4.0, device=x.device)),
        lambda x: x[1].copy_(x[0]),
        lambda x: x.t()[1].zero_(),
        lambda x: x[:, 2:].add_(x[:, :2]),
        lambda x: x.zero_(),
        lambda x: x.expand(3, 4).mul_(2),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch.mul(x, 2, out=x[:, :]),
        lambda x: x.__setitem__((slice(None), 1), 5.0),
        lambda x: x.__setitem__(0, x[1]),
        lambda x: x.resize_(2, 2),
        lambda x: x.set_(x.untyped_storage(), 1, (2, 2), (4, 1)),
    ],
)
def test_changed_in_place_as_on_the_cpu(change):
    x = sample()
    there = x.to("tpu")
    change(x)
    change(there)
    same(there, x)


def test_out_is_resized_and_written():
    a, b = sample(), sample() * 2
    out = torch.empty(0, device="tpu")
    result = torch.add(a.to("tpu"), b.to("tpu"), out=out)
    assert result is out
    same(out, a + b)
    wide = torch.empty(3, 4, dtype=torch.float64, device="tpu")
    torch.add(a.to("tpu"), b.to("tpu"), out=wide)
    same(wide, (a + b).double())
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(
            a.to("tpu"), b.to("tpu"), out=torch.empty(3, 4, dtype=torch.int32, device="tpu")
        )


def test_sizes_that_numbers_decide():
    """Empty ranges before others of the same types, and `out` of another call's size."""
    for ends in ((0,), (5,), (3, 3), (2, 5), (1.0, 1.0), (0.5, 3.5)):
        assert torch.arange(*ends, device="tpu").tolist() == torch.arange(*ends).tolist()
    out = torch.arange(3, device="tpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.arange(5, out=out)
    assert out.tolist() == [0, 1, 2, 3, 4]


def test_storages_are_freed_and_come_back():
    # What FSDP2 does to the parameters that it gathers.
    x = sample().to("tpu")
    storage = x.untyped_storage()
    bytes_before = torch.tpu.memory_allocated()
    storage.resize_(0)
    assert torch.tpu.memory_allocated() == bytes_before - x.nbytes
    assert storage.size() == 0
    storage.resize_(x.nbytes)
    x.copy_(sample())
    same(x, sample())
    storage.resize_(2 * x.nbytes)
    same(x, sample())


def test_numbers_and_truth():
    x = sample().to("tpu")
    assert x[1, 2].item() == sample()[1, 2].item()
    assert x.tolist() == sample().tolist()
    assert bool((x == x).all())
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
    assert not torch.equal(x, x[:2])
    with pytest.raises(RuntimeError, match="12 elements"):
        x.item()


def test_printed_as_on_the_cpu():
    for x in (
        sample(),
        sample(dtype=torch.int64),
        torch.rand(50, 60),
        sample(dtype=torch.bool),
    ):
        device = "".join(repr(x.to("tpu")).split())
        assert device.replace(",device='tpu:0'", "") == "".join(repr(x).split())


def test_saved_and_loaded():
    x = sample()
    there = {"whole": x.to("tpu"), "view": x.to("tpu")[:, 1:]}
    file = io.BytesIO()
    torch.save(there, file)
    for location, device in ((None, "tpu"), ("cpu", "cpu"), ("tpu", "tpu"), ("tpu:0", "tpu")):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert loaded["view"].device.type == device
        assert torch.equal(loaded["view"].cpu(), x[:, 1:])
        assert torch.equal(loaded["whole"].cpu(), x)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    same(torch.load(file, map_location="tpu"), x)


def test_copied_deeply_and_pickled():
    x = sample().to("tpu")
    parameter = torch.nn.Parameter(x)
    for other in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert isinstance(other, torch.nn.Parameter)
        assert other.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        same(other.detach(), sample())


def test_exchanged_by_dlpack_through_the_cpu():
    x = sample().to("tpu")
    assert torch.equal(torch.from_dlpack(x.cpu()), sample())
    assert torch.equal(torch.from_dlpack(x, device="cpu"), sample())
    assert numpy.array_equal(numpy.from_dlpack(x, device="cpu"), sample())
    with pytest.raises((BufferError, RuntimeError)):
        numpy.from_dlpack(x)


def test_exchanged_by_dlpack_in_place_with_torch():
    x = sample().to("tpu")
    torch.from_dlpack(x).add_(1)
    same(x, sample() + 1)
    with pytest.raises(RuntimeError, match="through the CPU"):
        torch.from_dlpack(x[1]).add_(1)


def test_pinned_memory():
    x = sample().pin_memory()
    assert x.is_pinned()
    assert not sample().is_pinned()
    same(x.to("tpu", non_blocking=True), sample())
    back = torch.empty(3, 4, pin_memory=True)
    back.copy_(x.to("tpu"), non_blocking=True)
    torch.tpu.synchronize()
    assert torch.equal(back, sample())


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (lambda: torch.empty(2, device="tpu:1"), RuntimeError, "index 0"),
        (lambda: torch.ones(2, device="tpu") + torch.ones(2), RuntimeError, "same device"),
        (
            lambda: torch.ones(2, device="tpu") + torch.ones(3, device="tpu"),
            RuntimeError,
            "broadcast",
        ),
        (lambda: torch.ones(2, device="tpu", pin_memory=True), RuntimeError, "pin"),
        (lambda: torch.tpu.set_device(1), ValueError, "index 0"),
        (lambda: torch.tpu.synchronize("cpu"), ValueError, "tpu device"),
        (lambda: torch.ones(2, device="tpu").view(3), RuntimeError, "invalid for input"),
    ],
)
def test_mistakes_are_told(wrong, error, says):
    with pytest.raises(error, match=says):
        wrong()


def test_a_parameter_stays_itself_when_it_moves():
    linear = torch.nn.Linear(3, 4)
    before = list(linear.parameters())
    expected = linear.weight.detach().clone()
    linear.to("tpu")
    assert all(a is b for a, b in zip(before, linear.parameters(), strict=True))
    same(linear.weight.detach(), expected)
    linear.weight.data = expected
    assert linear.weight.is_cpu


def test_gradients_flow():
    x = sample()
    there = x.to("tpu").requires_grad_()
    here = x.clone().requires_grad_()
    for leaf in (here, there):
        y = (leaf[:, 1:] * 3).t()
        (y * y).sum().backward()
    same(there.grad, here.grad)
    assert there.grad_fn is None
    assert (there * 2).grad_fn is not None
