"""The library of a CPU's float32 products: measured once for a kind of machine, kept, and never one that rounds to
bfloat16. And freed memory, which is kept too."""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offrl.errors import UserError
from offrl.system import backend, devices

CPU = torch.device("cpu")
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Another CPU in this one's place, with an empty cache folder: its maker, its flags, and how much faster oneDNN
    is.
    """
    monkeypatch.setenv("OFFRL_CACHE", str(tmp_path))
    monkeypatch.delenv(devices.PRODUCTS, raising=False)
    switch = SimpleNamespace(fp32_precision="none")

    def become(maker: str = "GenuineIntel", flags: str = "avx2 avx512f", gain: float = 2.0, error: float = 1.0) -> None:
        for function in (devices.onednn_is_exact, devices._kept):
            function.cache_clear()
        monkeypatch.setattr(devices, "processor", lambda: [f"vendor_id : {maker}", f"flags : {flags}"])
        monkeypatch.setattr(devices, "matmul_switch", lambda: switch)
        monkeypatch.setattr(devices, "measure_libraries", lambda: (gain, 1.0))
        monkeypatch.setattr(devices, "_error", lambda a, b, library: error if library == devices.ONEDNN else 1.0)

    yield become
    for function in (devices.onednn_is_exact, devices._kept):
        function.cache_clear()


def test_the_faster_library_is_taken_whoever_made_the_cpu(machine: Machine) -> None:
    machine("GenuineIntel", gain=2.0)
    assert devices.products_library() == devices.ONEDNN
    machine("AuthenticAMD", gain=0.9)
    assert devices.products_library() == devices.DEFAULT
    machine("CentaurHauls", gain=1.03)  # nearly as fast: noise does not decide
    assert devices.products_library() == devices.DEFAULT


def test_a_choice_is_kept_for_the_next_process(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(gain=2.0)
    assert devices.products_library() == devices.ONEDNN
    machine(gain=0.5)  # a later process, on a day when the other library happens to be faster
    assert devices.products_library() == devices.ONEDNN
    machine(gain=0.5, flags="avx2")  # another machine
    assert devices.products_library() == devices.DEFAULT
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    machine(gain=0.5)
    assert devices.products_library() == devices.DEFAULT


def test_a_damaged_note_is_measured_anew(machine: Machine, tmp_path: Path) -> None:
    machine()
    assert devices.products_library() == devices.ONEDNN
    (note,) = tmp_path.glob("products-*")
    note.write_bytes(b"\xff\x00")
    machine()
    assert devices.products_library() == devices.ONEDNN
    assert note.read_text() == "onednn\n"


def test_bfloat16_is_never_taken(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for forced in ("", devices.ONEDNN):
        monkeypatch.setenv(devices.PRODUCTS, forced)
        machine(flags="avx512f amx_bf16")
        assert devices.products_library() == devices.DEFAULT
        machine(error=5.0)
        assert devices.products_library() == devices.DEFAULT


def test_a_library_can_be_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, gain in ((devices.DEFAULT, 2.0), (devices.ONEDNN, 0.5)):
        monkeypatch.setenv(devices.PRODUCTS, name)
        machine(gain=gain)
        assert devices.products_library() == name
        words = backend.configure(CPU, torch.get_num_threads())
        assert ("oneDNN" in words) is (name == devices.ONEDNN)
        assert devices.matmul_switch().fp32_precision == ("bf16" if name == devices.ONEDNN else "none")
    monkeypatch.setenv(devices.PRODUCTS, "blas")
    with pytest.raises(UserError, match="OFFRL_PRODUCTS=blas"):
        backend.configure(CPU, torch.get_num_threads())


def test_what_is_measured_are_both_libraries() -> None:
    seen: list[str] = []
    with devices.routed(devices.ONEDNN):
        seen.append(str(getattr(devices.matmul_switch(), "fp32_precision", "bf16")))
        with pytest.raises(ValueError), devices.routed(devices.DEFAULT):
            seen.append(str(getattr(devices.matmul_switch(), "fp32_precision", "none")))
            raise ValueError
        seen.append(str(getattr(devices.matmul_switch(), "fp32_precision", "bf16")))
    assert seen == ["bf16", "none", "bf16"]
    assert all(seconds > 0 for seconds in devices.measure_libraries())
    assert all(devices._error(a, b, devices.DEFAULT) < 1e-3 for a, b in devices._operands())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others have no mallopt")
def test_memory_of_an_update_is_kept_for_the_next() -> None:
    backend.configure(CPU, torch.get_num_threads())

    def update() -> None:
        first = torch.zeros(1_000_000)
        second, third = first + 1.0, first + 2.0
        del first, second, third

    update()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        update()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 10_000  # of 30,000 pages that are filled
