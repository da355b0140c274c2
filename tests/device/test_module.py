"""``torch.tpu``: device, memory, random numbers, streams, events, mixed precision."""

import subprocess
import sys
import textwrap
import time

import pytest
import torch


def child(code, **environment):
    """Runs Python code in a process of its own and gives what it did."""
    import os

    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_is_the_accelerator():
    assert torch.tpu.device_count() == 1
    assert torch.tpu.current_device() == 0
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.device_count() == 1
    assert torch.get_device_module("tpu") is torch.tpu
    with torch.tpu.device(0):
        assert torch.ones(1, device="tpu").is_tpu
    assert torch.ones(1).tpu().device == torch.device("tpu", 0)
    supported = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert torch.bfloat16 in supported
    assert torch.quint8 not in supported
    torch.accelerator.synchronize()


def test_it_is_chosen_where_it_is_asked_for():
    code = "import torch; print(torch.accelerator.is_available(), torch._C._get_accelerator())"
    assert child(code, TPU_DIST_VIRTUAL_SLICE="v5p:2x2x1").stdout.split() == ["True", "tpu"]
    without = dict.fromkeys(("TPU_DIST_VIRTUAL_SLICE", "TPU_DIST_PJRT_PLUGIN"), "")
    on_tpu = torch.tpu.get_device_properties().platform == "tpu"
    expected = ["True", "tpu"] if on_tpu else ["False", "cpu"]
    assert child(code, **without).stdout.split() == expected


def test_asking_for_it_costs_little():
    """Torch asks at every barrier."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            torch._C._get_accelerator()
        rounds.append((time.perf_counter() - start) / 200)
    assert min(rounds) < 10e-6


def test_groups_without_a_backend_have_that_of_the_device():
    code = """
        import os, torch, torch.distributed as dist
        store = dist.HashStore()
        dist.init_process_group(store=store, rank=0, world_size=1)
        group = dist.group.WORLD
        print([(d.type, group._get_backend(d).name()) for d in group._device_types])
        dist.destroy_process_group()
    """
    done = child(code, TPU_DIST_VIRTUAL_SLICE="v5p:1x1x1")
    assert done.stdout.strip() == "[('tpu', 'tpu_dist')]", done.stderr
    without = dict.fromkeys(("TPU_DIST_VIRTUAL_SLICE", "TPU_DIST_PJRT_PLUGIN"), "")
    assert child(code, **without).stdout.strip() == "[('cpu', 'gloo')]"


def test_properties():
    properties = torch.tpu.get_device_properties()
    assert properties.platform in ("cpu", "tpu")
    assert properties.platform_version
    assert torch.tpu.get_device_name() == properties.name
    assert torch.tpu.is_bf16_supported()


def test_a_virtual_slice_names_the_generation():
    code = "import torch; p = torch.tpu.get_device_properties(); print(p.name, p.virtual)"
    done = child(code, TPU_DIST_VIRTUAL_SLICE="v5p:2x2x1")
    assert done.stdout.split() == ["TPU", "v5p", "True"], done.stderr


def test_memory_is_counted():
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    unwritten = torch.empty(1000, device="tpu")
    assert torch.tpu.memory_allocated() == before
    x = unwritten.fill_(3)
    y = x.clone()
    assert torch.tpu.memory_allocated() == before + 4000
    del x, y, unwritten
    assert torch.tpu.memory_allocated() == before
    assert torch.tpu.max_memory_allocated() >= before + 4000
    assert torch.accelerator.max_memory_allocated() == torch.tpu.max_memory_allocated()
    assert torch.tpu.memory_stats()["allocation.all.allocated"] > 0
    torch.tpu.empty_cache()


def test_random_numbers_follow_the_seed():
    def draw():
        return torch.randn(50, device="tpu").cpu(), torch.rand(50, device="tpu").cpu()

    torch.tpu.manual_seed(3)
    first = draw()
    assert torch.tpu.initial_seed() == 3
    second = draw()
    torch.manual_seed(3)
    again = draw()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])

    state = torch.tpu.get_rng_state()
    third = draw()
    torch.tpu.set_rng_state(state)
    assert torch.equal(draw()[0], third[0])
    own = torch.Generator(device="tpu").manual_seed(3)
    assert torch.equal(torch.randn(50, device="tpu", generator=own).cpu(), first[0])
    with torch.random.fork_rng(device_type="tpu"):
        torch.tpu.manual_seed(99)
    assert torch.equal(torch.tpu.get_rng_state()[:8], state[:8])
    with pytest.raises(TypeError, match="16 elements"):
        torch.tpu.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_random_numbers_are_distributed_as_they_should_be():
    count = 100_000
    normal = torch.randn(count, device="tpu").cpu()
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    uniform = torch.rand(count, device="tpu").cpu()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01
    kept = torch.nn.functional.dropout(torch.ones(count, device="tpu"), 0.25).cpu()
    assert abs((kept == 0).float().mean() - 0.25) < 0.01
    assert torch.allclose(kept[kept != 0], torch.tensor(1 / 0.75))


def test_streams_are_one_queue():
    x = torch.ones(1000, device="tpu")
    other = torch.tpu.Stream(priority=-1)
    main = torch.tpu.current_stream()
    with torch.tpu.stream(other):
        assert torch.tpu.current_stream() == other
        y = x * 2
        event = other.record_event()
    assert torch.tpu.current_stream() == main
    main.wait_event(event)
    main.wait_stream(other)
    y.record_stream(main)
    event.synchronize()
    assert event.query()
    assert y.sum().item() == 2000


def test_events_tell_time():
    start, end = (torch.tpu.Event(enable_timing=True) for _ in range(2))
    start.record()
    x = torch.rand(300, 300, device="tpu")
    for _ in range(10):
        x = x @ x
    end.record()
    assert start.elapsed_time(end) > 0


def test_mixed_precision():
    linear = torch.nn.Linear(8, 8).to("tpu")
    x = torch.randn(4, 8, device="tpu")
    with torch.autocast("tpu", dtype=torch.bfloat16):
        y = linear(x)
        assert y.dtype == torch.bfloat16
        assert torch.softmax(y, -1).dtype == torch.float32
    y.float().sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_fallbacks_are_counted_and_can_be_errors():
    torch.tpu.reset_fallback_stats()
    x = torch.tensor([0, 1, 0, 2], device="tpu")
    assert x.nonzero().cpu().flatten().tolist() == [1, 3]
    assert torch.tpu.fallback_stats() == {"nonzero": 1}
    torch.tpu.reset_fallback_stats()
    assert torch.tpu.fallback_stats() == {}
    code = "import torch; torch.ones(2, device='tpu').nonzero()"
    done = child(code, TPU_DIST_FALLBACK="error")
    assert done.returncode != 0
    assert "NotImplementedError: nonzero" in done.stderr


def test_without_a_plugin_it_is_not_available():
    code = """
        import torch
        print(torch.tpu.is_available(), torch.tpu.device_count(), torch._C._get_accelerator())
        try:
            torch.ones(2, device="tpu").add_(1)
        except RuntimeError as error:
            print(error)
    """
    done = child(code, TPU_DIST_PJRT_PLUGIN="/nowhere/plugin.so")
    assert done.stdout.startswith("False 0 cpu"), done.stderr
    assert "/nowhere/plugin.so" in done.stdout


def test_failures_appear_where_asked():
    # More than any machine has.
    code = """
        import torch
        x = torch.ones(1, device="tpu")
        try:
            y = x.expand(1 << 46) + x
            print("later")
            torch.tpu.synchronize()
        except RuntimeError as error:
            print(type(error).__name__, error)
    """
    done = child(code, TPU_LAUNCH_BLOCKING="1")
    assert "later" not in done.stdout
    assert "add.Tensor" in done.stdout, done.stderr
    assert "add.Tensor" in child(code).stdout


def test_a_forked_child_is_told():
    code = """
        import os, torch
        x = torch.ones(2, device="tpu").add_(1)
        if os.fork() == 0:
            try:
                torch.ones(2, device="tpu").add_(1)
            except RuntimeError as error:
                print(error, flush=True)
            del x
            os._exit(0)
        os.wait()
        print(x.sum().item())
    """
    done = child(code)
    assert "forked" in done.stdout
    assert done.stdout.strip().endswith("4.0"), done.stderr


def test_import_opens_nothing_and_exit_is_clean():
    code = """
        import torch
        assert not torch.tpu.is_initialized()
        x = torch.randn(100, 100, device="tpu")
        held = [x @ x for _ in range(20)]
        assert torch.tpu.is_initialized()
    """
    done = child(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
