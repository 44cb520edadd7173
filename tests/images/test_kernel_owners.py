"""Which users' kernels are loaded, and which users may load a compiled kernel."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shardio.images.kernel import building, finding, loading
from shardio.images.trust import UntrustedError
from tests.images.test_kernel_files import ROOT, content, path
from tests.images.test_trust import OTHER_USER, as_root, mode_of, umask

__all__ = ["content", "path"]


@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_kernel_that_other_users_may_write_to_is_not_loaded_but_compiled_again(
    content: bytes, path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    others = path if which == "file" else path.parent
    others.chmod(0o777)
    assert loading.load_kernel() is None
    assert f"the {which} {others} belongs to" in str(finding.why_no_kernel())
    monkeypatch.setattr(building, "_compile", lambda: loading.unpack_kernel(content))
    with umask(0o077):
        assert building.build() == path
    assert (mode_of(path), mode_of(path.parent)) == (0o644, 0o755)
    assert loading.load_kernel() is not None


@as_root
def test_in_another_users_folder_nothing_is_loaded_or_compiled_and_one_warning_says_why(
    content: bytes, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    os.chown(path.parent, OTHER_USER, -1)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it must not be written there"))
    with caplog.at_level(logging.WARNING, "shardio"):
        finding.prepare_kernel()
    assert finding.find_kernel() is None
    (record,) = caplog.records
    reason = f"{path.parent} belongs to uid {OTHER_USER} and has mode 0755"
    for part in (reason, "uses libjpeg-turbo", "XDG_CACHE_HOME", "python -m shardio.images.kernel --system"):
        assert part in record.getMessage()
    with pytest.raises(UntrustedError, match=reason):
        building.build()


COMPILE_FOR_ALL = """
import os, runpy, sys
from pathlib import Path
import numba
from shardio.images.kernel import building, checking, finding, loading, __main__
system, user = map(Path, sys.argv[1:3])
whole = loading.read_kernel()
os.environ["XDG_CACHE_HOME"] = str(user)
loading.site_cache_path = lambda name: system / name
building._compile = lambda: whole
os.umask(0o077)
sys.argv[1:] = ["--system"]
runpy.run_module("shardio.images.kernel", run_name="__main__")
os.setgroups([])
os.setgid(12345)
os.setuid(12345)
kernel = finding.find_kernel()
print(kernel is not None, checking.find_difference(kernel), os.listdir(user))
"""


@as_root
def test_a_kernel_that_root_compiles_for_all_users_is_loaded_by_another_user() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if not all(mode_of(folder) & 0o001 for folder in root.parents):
            pytest.skip("other users cannot reach the folder for temporary files")
        root.chmod(0o755)
        for folder in ("user", "system"):
            (root / folder).mkdir()
            (root / folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", COMPILE_FOR_ALL, str(root / "system"), str(root / "user")],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        (published,) = (root / "system" / "shardio" / "kernels").glob("*.kernel")
        assert [mode_of(path) for path in (published, *published.parents[:2])] == [0o644, 0o755, 0o755]
        assert done.stdout == f"{published}\nTrue None []\n", done.stderr
