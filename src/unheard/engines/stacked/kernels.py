"""One local step of a chunk as a sequence of Triton kernels; on CUDA recorded once as a graph and replayed.

Input: `Buffers`. Output: the same buffers, one local step later. `KernelStep.take` launches the kernels in the order of
the equations in stacked/__init__.py:

    middle_weights, read_inputs, cell_forward (T times), project, attend,              forward
    project_back, cell_backward (T times), input_gradients,                            backward
    update_matrix (gates, projection), update_table, update_read, clip_scale           step and clip

On a Hopper GPU kernels in CUDA C++ (cuda_kernels.py) take the place of middle_weights, the cell, attend, update_matrix
of the gates, and update_table, for the models that they support.

Block sizes were chosen on an H200 (docs/log.md); they change the speed and never the meaning.
"""

from collections.abc import Callable

import torch
import triton

from unheard.engines.stacked import cell_kernels as cell
from unheard.engines.stacked import cuda_kernels
from unheard.engines.stacked import matrix_kernels as matrix
from unheard.engines.stacked import table_kernels as embedding
from unheard.engines.stacked.sizes import Buffers

LARGEST_BATCH = 128
"""The most positions of a local batch (B * T) that a kernel holds; the engine delegates larger batches."""
LARGEST_WIDTH = 256
"""The largest X (word vector and features) or H (state) that a kernel holds."""


class KernelStep:
    """The kernels of one local step, their block sizes and their intermediate tensors.

    Args:
        buffers: of the chunk.
        tuning: block sizes to override, by name (`_blocks`).
    """

    def __init__(self, buffers: Buffers, **tuning: int) -> None:
        self.b = buffers
        s, device = buffers.sizes, buffers.delta_UP.device
        self.blocks = _blocks(buffers, tuning)
        k = self.blocks
        self.cuda = bool(k["cuda"])
        tables = -(-s.V // (k["table_words"] * k["table_tiles"]))
        if self.cuda:
            tables = k["table_slices"]
        gate_blocks = s.G * -(-s.R // k["matrix_rows"]) * -(-s.H // k["matrix_cols"])
        if self.cuda:
            gate_blocks = s.G * s.H // 64
        projection_blocks = -(-(s.H + 1) // k["matrix_rows"]) * -(-s.D // k["matrix_cols"])
        # Each program writes the square of its part of the norm into a slot of its own, and slot_layer names the slot's
        # layer: sums without atomics are the same every time.
        layers = [0] * tables
        self.slot_gates = len(layers)
        for gate in range(s.G):
            layers += [1 + 2 * gate, 2 + 2 * gate] * (gate_blocks // s.G)
        self.slot_projection = len(layers)
        layers += [1 + 2 * s.G, 2 + 2 * s.G] * projection_blocks
        self.slot_output = 0 if s.tied else len(layers)
        layers += [] if s.tied else [3 + 2 * s.G] * tables
        self.slot_read, self.grid_read = len(layers), -(-s.N // 16)
        layers += [0] * self.grid_read
        self.slots = len(layers)
        self.grid_table, self.grid_gates, self.grid_projection = tables, gate_blocks, projection_blocks
        self.slot_layer = torch.tensor(layers, dtype=torch.int32, device=device)
        self.squares = torch.zeros(buffers.U, self.slots, device=device)
        # Intermediate tensors of a step: factors of products in the deltas' precision, the rest in float32.
        U, D, H, N, dtype = buffers.U, s.D, s.H, s.N, buffers.delta_UP.dtype
        self.middle_UW = torch.zeros(U, s.middle, dtype=dtype, device=device)
        self.input_UNX = torch.zeros(U, N, s.X, dtype=dtype, device=device)
        self.inverse_UN = torch.zeros(U, N, device=device)
        self.gate_UN4H = torch.zeros(U, N, 4, H, dtype=dtype, device=device)
        self.cell_UNH = torch.zeros(U, N, H, device=device)
        self.state_UNH = torch.zeros(U, N, H, dtype=dtype, device=device)
        self.output_UND = torch.zeros(U, N, D, dtype=dtype, device=device)
        self.log_sum_UN = torch.zeros(U, N, device=device)
        self.output_grad_UND = torch.zeros(U, N, D, dtype=dtype, device=device)
        self.state_grad_UNH = torch.zeros(U, N, H, device=device)
        self.carried_UBH = torch.zeros(U, s.B, H, device=device)
        self.input_grad_UND = torch.zeros(U, N, D, dtype=dtype, device=device)
        splits = k["splits"]
        self.part_sum = torch.zeros(buffers.U, splits, s.N, s.D, device=device)
        self.part_peak = torch.zeros(buffers.U, splits, s.N, device=device)
        self.part_total = torch.zeros(buffers.U, splits, s.N, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.cuda:
            self._compile_cuda()

    def _compile_cuda(self) -> None:
        """The kernels in CUDA C++, with the sizes as constants."""
        s, k = self.b.sizes, self.blocks
        base = dict(P=self.b.delta_UP.stride(0), M=s.M)
        constants = {**base, "AT": s.gates_at, "X": s.X, "T": s.T, "D": s.D}
        # The weights on the state are formed by the cells.
        self.formed = s.G * (s.X + 1) * s.H + (s.H + 1) * s.D
        self.form_weights = self.kernel("cells.cu", "form_weights", constants, threads=256, shared_bytes=0)
        self.lstm_forward = self.kernel(
            "cells.cu", "lstm_forward", constants, threads=256, shared_bytes=140_288 + 944 * s.N
        )
        self.lstm_backward = self.kernel(
            "cells.cu", "lstm_backward", constants, threads=256, shared_bytes=37_888 + 528 * s.N + 147_456
        )
        self.clusters = k["clusters"] or self.lstm_backward.clusters_at_once()
        constants = dict(
            **base, AT=s.output_at, LAYER=0 if s.tied else 3 + 2 * s.G, SLOTS=self.slots, SLOT=self.slot_output,
            V=s.V, D=s.D, N=s.N, UNIT=int(s.unit_norm), SLICES=k["table_slices"], WARPS=k["dense_warps"],
            TILES=k["dense_tiles"], BLOCKS_PER_SM=k["dense_blocks"],
        )  # fmt: skip
        shared = s.N * (2 * s.D + 16) + 8 * s.N + k["dense_warps"] * (4 + k["dense_tiles"] * 64 * s.D)
        self.update_dense = self.kernel(
            "table.cu", "update_table_dense", constants, threads=32 * k["dense_warps"], shared_bytes=shared
        )

        constants = dict(
            **base, AT=s.output_at, LAYER=0 if s.tied else 3 + 2 * s.G, V=s.V, D=s.D, N=s.N, UNIT=int(s.unit_norm),
            SPLITS=k["splits"], BLOCKS_PER_SM=k["attend_blocks"],
        )  # fmt: skip
        shared = 2 * s.N * (2 * s.D + 16) + 4 * (s.D // 32) * 2 * s.N * 16
        self.attend_words = self.kernel("attend.cu", "attend_words", constants, threads=2 * s.N, shared_bytes=shared)

        constants = dict(
            **base, AT=s.gates_at, X=s.X, T=s.T, SLOTS=self.slots, SLOT=self.slot_gates, WARPS=k["gates_warps"],
            BLOCKS_PER_SM=k["gates_blocks"],
        )  # fmt: skip
        shared = s.N * (2 * (s.X + s.H) + 16 + 2 * 64 + 16) + 8 * k["gates_warps"]
        self.update_gates = self.kernel(
            "matrices.cu", "update_gates", constants, threads=32 * k["gates_warps"], shared_bytes=shared
        )

    kernel = cuda_kernels.CudaKernel

    @torch.no_grad()
    def run(self, num_steps: int) -> None:
        """Takes `num_steps` local steps of all users; on CUDA all but the first as replays of one recorded graph."""
        if self.b.delta_UP.device.type != "cuda":
            for _ in range(num_steps):
                self.take()
            return
        if self.graph is None and num_steps:
            self.take()  # compiles the kernels, which is not possible while recording
            num_steps -= 1
            self.graph = _recorded(self.take)
        for _ in range(num_steps):
            assert self.graph is not None
            self.graph.replay()

    def take(self) -> None:
        """One local step: forward, backward, step, clip."""
        b, s, k = self.b, self.b.sizes, self.blocks
        U, table = b.U, 0 if s.tied else 3 + 2 * s.G
        how = dict(PRECISION="tf32x3", UPCAST=b.delta_UP.device.type == "cpu")
        at_work = (b.step, b.num_steps_U)
        params = (b.delta_UP, b.theta0_RP, b.scale_UM, b.run_U, *at_work)
        D, H, N, X, R, G, P, M, W = s.D, s.H, s.N, s.X, s.R, s.G, b.delta_UP.stride(0), s.M, s.middle
        DB, NB, XB = (max(16, triton.next_power_of_2(size)) for size in (D, N, X))
        (D1, D2), (N1, N2) = _two_blocks(D), _two_blocks(N)
        BB = max(16, triton.next_power_of_2(s.B))
        projection = G * R * H

        clusters = min(U, self.clusters) if self.cuda else 0
        if self.cuda:
            self.form_weights((triton.cdiv(self.formed // 8, 256), U), (*params, self.middle_UW))
        else:
            matrix.middle_weights[(triton.cdiv(W, 2048), U)](
                *params, self.middle_UW, P=P, AT=s.gates_at, M=M, D=D, H=H, G=G, R=R, MIDDLE=W, BLOCK=2048, num_warps=4
            )
        cell.read_inputs[(G * triton.cdiv(H, k["input_cols"]), U)](
            *params, b.token_SUN, b.features_UF, self.middle_UW, self.input_UNX, self.inverse_UN, self.gate_UN4H, U,
            P=P, M=M, D=D, F=s.F, H=H, N=N, R=R, MIDDLE=W, XB=XB, NB=NB, BJ=k["input_cols"], UNIT=s.unit_norm, **how,
            num_warps=k["input_warps"],
        )  # fmt: skip
        if self.cuda:
            self.lstm_forward((4 * clusters, 1), (*params, self.gate_UN4H, self.cell_UNH, self.state_UNH, U, clusters))
        else:
            for t in range(s.T):
                cell.cell_forward[(triton.cdiv(H, k["forward_cols"]), U)](
                    *at_work, self.middle_UW, self.gate_UN4H, self.cell_UNH, self.state_UNH, t, U,
                    X=X, H=H, B=s.B, N=N, G=G, R=R, MIDDLE=W, BB=BB, BJ=k["forward_cols"], BK=k["forward_depth"],
                    GRU=s.is_gru, FIRST=t == 0, **how, num_warps=k["forward_warps"], num_stages=k["forward_stages"],
                )  # fmt: skip
        places = triton.cdiv(N, k["places"])
        matrix.project[(places, U)](
            *at_work, self.middle_UW, self.state_UNH, self.output_UND,
            D=D, H=H, N=N, AT=projection, MIDDLE=W, DB=DB, BN=k["places"], BK=64, **how, num_warps=4,
        )  # fmt: skip
        if self.cuda:
            self.attend_words(
                (k["splits"], U), (*params, self.output_UND, self.part_sum, self.part_peak, self.part_total)
            )
        else:
            embedding.attend[(k["splits"], U)](
                *params, self.output_UND, self.part_sum, self.part_peak, self.part_total,
                P=P, AT=s.output_at, LAYER=table, M=M, V=s.V, D=D, N=N, D1=D1, D2=D2, NB=NB,
                BV=k["attend_words"], SPLITS=k["splits"], UNIT=s.unit_norm, **how,
                num_warps=k["attend_warps"], num_stages=k["attend_stages"],
            )  # fmt: skip
        matrix.project_back[(places, U)](
            *params, b.target_SUN, b.share_SU, self.middle_UW, self.part_sum, self.part_peak, self.part_total,
            self.log_sum_UN, self.output_grad_UND, self.state_grad_UNH, U,
            P=P, TABLE=s.output_at, LAYER=table, M=M, D=D, H=H, N=N, AT=projection, MIDDLE=W,
            DB=DB, BN=k["places"], BK=64, SPLITS=k["splits"], UNIT=s.unit_norm, **how, num_warps=4,
        )  # fmt: skip
        if self.cuda:
            self.lstm_backward(
                (4 * clusters, 1), (*params, self.gate_UN4H, self.cell_UNH, self.state_grad_UNH, U, clusters)
            )
        else:
            for t in reversed(range(s.T)):
                cell.cell_backward[(triton.cdiv(H, k["backward_cols"]), U)](
                    *at_work, self.middle_UW, self.gate_UN4H, self.cell_UNH, self.state_grad_UNH, self.carried_UBH, t, U,
                    X=X, H=H, B=s.B, N=N, G=G, R=R, MIDDLE=W, BB=BB, BJ=k["backward_cols"], BK=k["backward_depth"],
                    GRU=s.is_gru, FIRST=t == 0, LAST=t == s.T - 1, **how,
                    num_warps=k["backward_warps"], num_stages=k["backward_stages"],
                )  # fmt: skip
        cell.input_gradients[(places, U)](
            *at_work, self.middle_UW, self.gate_UN4H, self.input_UNX, self.inverse_UN, self.input_grad_UND,
            D=D, X=X, H=H, N=N, G=G, R=R, MIDDLE=W, DB=DB, NB=NB, BN=k["places"], BK=64, UNIT=s.unit_norm, **how, num_warps=4,
        )  # fmt: skip
        stepping = (b.scale_UM, b.run_U, *at_work, b.rate_R, b.keep_R)
        blocks = dict(P=P, M=M, SLOTS=self.slots, N=N, NB=NB, BR=k["matrix_rows"], BC=k["matrix_cols"])
        if self.cuda:
            self.update_gates(
                (self.grid_gates, U),
                (b.delta_UP, *stepping, self.input_UNX, self.state_UNH, self.gate_UN4H, self.squares),
            )
        else:
            matrix.update_matrix[(self.grid_gates, U)](
                b.delta_UP, *stepping, self.input_UNX, self.state_UNH, self.gate_UN4H, self.squares, **blocks,
                AT=s.gates_at, LAYER=1, SLOT=self.slot_gates, X=X, K=H, C=H, STRIDE=4 * H, SHIFT=s.B, GRU=s.is_gru, **how,
                num_warps=k["matrix_warps"],
            )  # fmt: skip
        matrix.update_matrix[(self.grid_projection, U)](
            b.delta_UP, *stepping, self.input_UNX, self.state_UNH, self.output_grad_UND, self.squares, **blocks,
            AT=s.projection_at, LAYER=1 + 2 * G, SLOT=self.slot_projection, X=0, K=H, C=D, STRIDE=D, SHIFT=0, GRU=False, **how,
            num_warps=k["matrix_warps"],
        )  # fmt: skip
        tables = [(0, 0, 0, True)] if s.tied else [(0, 0, 0, False), (s.output_at, table, self.slot_output, True)]
        for at, layer, slot, dense in tables:
            if dense and self.cuda:
                self.update_dense(
                    (k["table_slices"], U),
                    (b.delta_UP, b.theta0_RP, *stepping, b.target_SUN, b.share_SU, self.output_UND, self.log_sum_UN,
                     self.squares, U),
                )  # fmt: skip
                continue
            embedding.update_table[(self.grid_table, U)](
                b.delta_UP, b.theta0_RP, *stepping, b.target_SUN, b.share_SU, self.output_UND, self.log_sum_UN, self.squares, U,
                P=P, AT=at, LAYER=layer, M=M, SLOTS=self.slots, SLOT=slot, V=s.V, D=D, N=N, D1=D1, D2=D2, N1=N1, N2=N2,
                BV=k["table_words"], TILES=k["table_tiles"], DENSE=dense, UNIT=s.unit_norm, **how,
                num_warps=k["table_warps"], num_stages=k["table_stages"],
            )  # fmt: skip
        embedding.update_read[(self.grid_read, U)](
            b.delta_UP, b.run_U, *at_work, b.rate_R, b.token_SUN, self.input_grad_UND, self.squares, U,
            P=P, SLOTS=self.slots, SLOT=self.slot_read, D=D, N=N, DB=DB, NB=NB, BN=16, **how, num_warps=4,
        )  # fmt: skip
        matrix.clip_scale[(U,)](
            self.squares, self.slot_layer, b.radius_RM, b.clip_kind_R, b.run_U, *at_work, b.scale_UM, b.unclipped_U,
            SLOTS=self.slots, SB=triton.next_power_of_2(self.slots), M=M,
        )  # fmt: skip
        b.step.add_(1)


def _recorded(take: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one local step."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take()
    return graph


def _two_blocks(size: int) -> tuple[int, int]:
    """A size as the sum of two powers of two of at least 16, the second of which may be 0:

    96 = 64 + 32, 80 = 64 + 16.
    """
    whole = max(16, triton.next_power_of_2(size))
    if size == whole or size <= 32:
        return whole, 0
    rest = max(16, triton.next_power_of_2(size - whole // 2))
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)


def _blocks(buffers: Buffers, tuning: dict[str, int]) -> dict[str, int]:
    """Block sizes that were fastest on an H200; smaller for a small model."""
    s = buffers.sizes
    fine, cuda = buffers.delta_UP.dtype == torch.float32, cuda_kernels.supported(buffers)
    H, D = (max(16, triton.next_power_of_2(size)) for size in (s.H, s.D))
    V = max(16, triton.next_power_of_2(s.V))
    return {
        "splits": 4 if fine else 3 if cuda else 2,
        "attend_words": min(V, 32 if fine else 64),
        "attend_warps": 8,
        "attend_stages": 2 if fine else 3,
        "table_words": min(V, 32 if fine else 64),
        "table_tiles": min(8, -(-s.V // min(V, 64))),
        "table_warps": 8 if fine else 4,
        "table_stages": 2 if fine else 1,
        "input_cols": min(H, 32 if fine else 128),
        "input_warps": 8,
        "forward_cols": min(H, 32 if fine else 64),
        "forward_depth": min(H, 64 if fine else 128),
        "forward_warps": 4,
        "forward_stages": 2,
        "backward_cols": min(H, 32 if fine else 64),
        "backward_depth": min(H, 64 if fine else 256),
        "backward_warps": 4,
        "backward_stages": 3 if fine else 2,
        "places": 64,
        "matrix_rows": min(32 if fine else 64, H),
        "matrix_cols": min(64 if fine else 128, H, D),
        "matrix_warps": 4,
        "cuda": int(cuda),
        "table_slices": min(10, -(-s.V // 64)),
        "dense_warps": 4,
        "dense_tiles": 1,
        "dense_blocks": 3,
        "attend_blocks": 3,
        "clusters": 0,
        "gates_warps": 8,
        "gates_blocks": 2,
        **tuning,
    }
