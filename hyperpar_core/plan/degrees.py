"""The axes of a mesh and their degrees."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlanError, Refused
from .names import nearest
from .yaml_files import shown

__all__ = ["MESH_AXES", "mesh_sizes"]

MESH_AXES = ("dp", "cp", "tp")


def mesh_sizes(mesh: DeviceMesh | Mapping[str, int]) -> dict[str, int]:
    """{axis: degree} in the order dp, cp, tp, those of size 1 left out. PlanError for an axis that hyperpar doesn't know."""
    if isinstance(mesh, DeviceMesh):
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        if not sizes:
            raise PlanError(
                "the mesh has no axis names; make it with make_mesh(dp=..., cp=..., tp=...) or name its dims."
            )
    elif isinstance(mesh, Mapping):
        sizes = dict(mesh)
    else:
        raise PlanError(f"expected a DeviceMesh or {{axis: degree}}, got {shown(mesh)}.")
    if "pp" in sizes:
        raise Refused(
            "the mesh has a pp axis; a plan describes one pipeline stage. Split the mesh by stage (mesh['dp', 'cp', 'tp'] on the"
            " ranks of a stage), and plan each stage's part of the model with its own mesh."
        )
    for axis, size in sizes.items():
        if axis == "ep":
            raise PlanError(
                f"unknown mesh axis 'ep' (axes: {', '.join(MESH_AXES)}): experts spread over their ranks. Leave it out, and pass"
                f" ep_size={size}."
            )
        if axis not in MESH_AXES:
            raise PlanError(
                f"unknown mesh axis {shown(axis)} (axes: {', '.join(MESH_AXES)}; the expert mesh is derived from them)."
                + nearest(str(axis), MESH_AXES)
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PlanError(f"mesh axis {axis}: a degree is a positive whole number, got {shown(size)}.")
    if list(sizes) != [axis for axis in MESH_AXES if axis in sizes]:
        if isinstance(mesh, DeviceMesh):
            raise PlanError(f"the mesh's axes are ordered {tuple(sizes)}; the order must be dp, cp, tp (tp innermost).")
        sizes = {axis: sizes[axis] for axis in MESH_AXES if axis in sizes}
    return {axis: size for axis, size in sizes.items() if size > 1}
