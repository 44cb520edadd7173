"""Compile the functions, for this processor or for another one of its kind. This needs numba, and nothing else."""

from __future__ import annotations

import re

import llvmlite.binding as llvm

from shardio.images.kernel.compiled.entry import compile_entries


def compile_functions() -> str:
    """Return the LLVM code of all functions, which refers to nothing but C's memory and mathematical functions."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    whole, *others = [llvm.parse_assembly(_close(code, own, name)) for name, (code, own) in compile_entries().items()]
    for other in others:
        whole.link_in(other)
    return str(whole)


def emit_object(code: str, processor: str, features: str = "") -> bytes:
    """Return an object file with position-independent machine code.

    Args:
        code: LLVM code.
        processor: LLVM's name of the processor.
        features: The features that the processor has or lacks besides, as LLVM writes them.
    """
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=processor, features=features, opt=3, reloc="pic", codemodel="default"
    )
    content: bytes = machine.emit_object(llvm.parse_assembly(code))
    return content


def emit_for_this_processor(code: str) -> bytes:
    """Return an object file with machine code for the processor of this machine."""
    return emit_object(code, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


def _close(code: str, own_name: str, name: str) -> str:
    """Return LLVM code that exports one function, under a new name, and has no external references.

    numba declares functions of its own runtime and of Python's that allocate arrays and raise errors. The kernel does
    neither, so they are never called. If one is called nevertheless, the process aborts.
    """
    code = re.sub(
        r"^declare (?!.*@llvm\.)(.*\))(.*)$",
        r"define internal \1 { call void @llvm.trap() unreachable }",
        code,
        flags=re.M,
    )
    code = re.sub(r"^(@\w+) = external global (\w+).*$", r"\1 = internal global \2 0", code, flags=re.M)
    code = re.sub(r"^(@\S+) = (?:common|linkonce_odr) ", r"\1 = internal ", code, flags=re.M)
    code = re.sub(r"^define (?:linkonce_odr )?(?!internal )", "define internal ", code, flags=re.M)
    code = re.sub(rf"^define internal (.*@{re.escape(own_name)}\()", r"define \1", code, flags=re.M)
    return code.replace(own_name, name) + "\ndeclare void @llvm.trap()\n"
