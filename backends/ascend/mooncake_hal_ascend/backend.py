"""The Ascend backend: its parts put together."""

from __future__ import annotations

from mooncake_hal.backend import Capabilities, Communicator, DeploymentConstraints, GroupSpec
from mooncake_hal.collectives import GroupFactory
from mooncake_hal.errors import BackendUnavailable
from mooncake_hal_ascend.communicator import HcclCommunicator
from mooncake_hal_ascend.memory import AscendMemory
from mooncake_hal_ascend.ops import AscendOps
from mooncake_hal_ascend.runtime import AscendRuntime

DTYPES = ("bfloat16", "float16")
"""The attention ops take no others."""
KV_LAYOUTS = ("LPBTH",)
"""Ops want K and V as tensors of their own: ``[blocks, tokens, heads, dim]``."""
TRANSPORTS = ("hccs",)

MAX_GRAPHS = 600
"""A graph holds one of the device's 2,048 streams, and two more if ranks talk in it (vLLM-Ascend
issue 1168); newer releases of CANN allow for more."""


class AscendBackend:
    """Everything about the NPUs that this process sees.

    Raises:
        BackendUnavailable: torch-npu sees none, or one of another family.
    """

    name = "ascend"

    def __init__(self) -> None:
        self.runtime = AscendRuntime()
        devices = self.runtime.devices()
        if not devices:
            raise BackendUnavailable(
                self.name, "torch-npu sees no device; see ASCEND_RT_VISIBLE_DEVICES"
            )
        soc = self.runtime.soc
        self.capabilities = Capabilities(
            dtypes=DTYPES,
            block_sizes=(soc.block_size,),
            kv_layouts=KV_LAYOUTS,
            graphs=True,
            max_graphs=MAX_GRAPHS,
            transports=TRANSPORTS,
            constraints=DeploymentConstraints(
                any_tp_ratio=False,
                same_generation=True,
                same_backend=True,
                block_size=soc.block_size,
            ),
            scheduler_resource="NPU",
            latent_dims=soc.latent_dims,
            resident_latents=True,
        )
        self.ops = AscendOps(soc)
        self.memory = AscendMemory(self.runtime, soc.transfer_alignment)
        self._groups = GroupFactory(HcclCommunicator)

    def communicator(self, group: GroupSpec) -> Communicator:
        """See ``Backend``."""
        return self._groups.join(group)
