"""One local step of a chunk as a sequence of Triton kernels. On CUDA the sequence is recorded once as a graph.

Input: `Buffers`. Output: the same buffers, one local step later. `KernelStep.take` launches the kernels in the order of
the equations in stacked/__init__.py:

    form_state_weights, read_inputs, cell_forward (T times), project, attend,          forward
    project_back, cell_backward (T times), input_gradients,                            backward
    update_matrix (gates, projection), update_table, update_read, clip_scale           step and clip

On a Hopper GPU, for the models that they support, kernels in CUDA C++ (cuda_kernels.py) replace form_state_weights, the
cell, attend, update_matrix of the gates, and update_table.

Block sizes were chosen by measurements on an H200 (docs/log.md). They change the speed, and the results only within
rounding.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import triton

from unheard.engines.stacked import cell_kernels as cell
from unheard.engines.stacked import cuda_kernels
from unheard.engines.stacked import matrix_kernels as matrix
from unheard.engines.stacked import table_kernels as embedding
from unheard.engines.stacked.sizes import Buffers

LARGEST_BATCH = 128
"""The largest number of positions of a local batch (B * T). The engine delegates larger batches."""
LARGEST_WIDTH = 256
"""The largest X (word vector and features) and H (state). The engine delegates larger models."""


class KernelStep:
    """The kernels of one local step, their block sizes and their intermediate tensors.

    Args:
        buffers: The buffers of the chunk.
        tuning: Block sizes that replace the defaults, by their names in `_blocks`.
    """

    def __init__(self, buffers: Buffers, **tuning: int) -> None:
        self.b = buffers
        s, device = buffers.sizes, buffers.delta_UP.device
        self.blocks = _blocks(buffers, tuning)
        k = self.blocks
        self.cuda = self.knows_squares = bool(k["cuda"])
        tables = -(-s.V // (k["table_words"] * k["table_tiles"]))
        if self.cuda:
            tables = k["table_slices"]
        gate_blocks = s.G * -(-s.R // k["matrix_rows"]) * -(-s.H // k["matrix_cols"])
        if self.cuda:
            gate_blocks = s.G
        projection_blocks = -(-(s.H + 1) // k["matrix_rows"]) * -(-s.D // k["matrix_cols"])
        # Each program writes the squared norm of its part into a slot of its own; slot_layer has the layer of each
        # slot. Atomic additions would give sums that depend on the order of programs.
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
        self.squares = torch.zeros(buffers.U, self.slots, dtype=torch.float64, device=device)
        # Intermediate tensors of a step. Factors of products have the type of the deltas; the others are float32.
        U, D, H, N, dtype = buffers.U, s.D, s.H, s.N, buffers.delta_UP.dtype
        self.middle_UW = torch.zeros(0 if self.cuda else U, s.G * s.R * s.H, dtype=dtype, device=device)
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
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        if self.cuda:
            # In the first local step all users of a run have the same word vectors, so one table per run is enough.
            words = math.lcm(k["attend_words"], k["fresh_words"])
            rows = -(-s.V // words) * words
            self.vector_RVD = torch.zeros(buffers.R, rows, D, dtype=dtype, device=device)
            self.vector_inverse_RV = torch.zeros(buffers.R, rows, device=device)
            self.cuda_kernels = {fresh: self._compile_cuda(fresh) for fresh in (True, False)}
            self.clusters = k["clusters"] or self.cuda_kernels[False]["lstm_backward"].clusters_at_once()

    def _compile_cuda(self, fresh: bool) -> dict[str, cuda_kernels.CudaKernel]:
        """Compile the kernels in CUDA C++, with the sizes as constants, and return them by name.

        Args:
            fresh: Whether the kernels are for the first local step.
        """
        s, k = self.b.sizes, self.blocks
        base = dict(P=self.b.delta_UP.stride(0), M=s.M, FRESH=int(fresh))
        gates = dict(**base, AT=s.gates_at, X=s.X, T=s.T)
        table = dict(
            **base, AT=s.output_at, LAYER=0 if s.tied else 3 + 2 * s.G, V=s.V, D=s.D, N=s.N, UNIT=int(s.unit_norm)
        )
        words = k["fresh_words"] if fresh else k["attend_words"]
        attend = dict(**table, SPLITS=k["splits"], WORDS=words, BLOCKS_PER_SM=k["attend_blocks"])
        warps, gate_warps = k["dense_warps"], k["gates_warps"]
        update = dict(
            **table, SLOTS=self.slots, SLOT=self.slot_output, SLICES=k["table_slices"], WARPS=warps,
            TILES=k["dense_tiles"], BLOCKS_PER_SM=k["dense_blocks"],
        )  # fmt: skip
        matrices = dict(
            **gates, SLOTS=self.slots, SLOT=self.slot_gates, WARPS=gate_warps, BLOCKS_PER_SM=k["gates_blocks"]
        )
        shapes = {  # by kernel: file, constants, threads per block, bytes of shared memory
            "lstm_forward": ("cells.cu", gates, 256, 140_288 + 992 * s.N + 16),
            "lstm_backward": ("cells.cu", gates, 256, 16_384 + 576 * s.N + 147_456 + 16),
            "form_vectors": ("attend.cu", attend, 64, 0),
            "attend_words": ("attend.cu", attend, 2 * s.N, 4 * words * 2 * s.D + 32),
            "update_gates": (
                "matrices.cu", matrices, 32 * gate_warps,
                s.N * (2 * (s.X + s.H) + 16 + 2 * (2 * 64 + 16)) + 16 * gate_warps,
            ),
            "update_table_dense": (
                "table.cu", update, 32 * warps,
                s.N * (2 * s.D + 16) + 8 * s.N + warps * (16 + (1 if fresh else 3) * k["dense_tiles"] * 32 * s.D),
            ),
        }  # fmt: skip
        return {
            name: self.kernel(file, name, constants, threads=threads, shared_bytes=shared)
            for name, (file, constants, threads, shared) in shapes.items()
        }

    kernel = cuda_kernels.CudaKernel

    @torch.no_grad()
    def run(self, num_steps: int) -> None:
        """Take `num_steps` local steps of all users. A user who has fewer steps is skipped after the last one.

        On CUDA the step is recorded as a graph at the first call: one graph for the first local step, and one for the
        others.
        """
        for step in range(num_steps):
            is_first = step == 0
            if is_first in self.graphs:
                self.graphs[is_first].replay()
                continue
            self.take(is_first)  # Triton compiles the kernels here; it cannot compile while a graph is recorded.
            if self.b.delta_UP.device.type == "cuda":
                self.graphs[is_first] = _recorded(partial(self.take, is_first))

    def take(self, is_first: bool) -> None:
        """Take one local step of all users: forward pass, backward pass, update, and the factors of the clip.

        Args:
            is_first: Whether it is the first local step. If so, deltas are taken to be zero and their memory is not
                read.
        """
        b, s, k = self.b, self.b.sizes, self.blocks
        U, table = b.U, 0 if s.tied else 3 + 2 * s.G
        how = dict(PRECISION="tf32x3", UPCAST=b.delta_UP.device.type == "cpu")
        fresh = dict(FRESH=is_first, **how)
        at_work = (b.step, b.num_steps_U)
        working = (b.run_U, *at_work)
        params = (b.delta_UP, b.theta0_RP, b.scale_UM, *working)
        D, H, N, X, R, G, P, M = s.D, s.H, s.N, s.X, s.R, s.G, b.delta_UP.stride(0), s.M
        DB, NB, XB = (max(16, triton.next_power_of_2(size)) for size in (D, N, X))
        (D1, D2), (N1, N2) = _two_blocks(D), _two_blocks(N)
        BB = max(16, triton.next_power_of_2(s.B))
        cuda = self.cuda_kernels[is_first] if self.cuda else {}
        clusters = min(U, self.clusters) if self.cuda else 0
        grid_cells = (4 * clusters, 1)
        # The gates' matrices for the cells in Triton. In the first local step all users of a run use those of theta0.
        middle, W = (b.theta0_RP[:, s.gates_at :], P) if is_first else (self.middle_UW, s.G * s.R * s.H)
        gates = dict(P=P, AT=s.gates_at, M=M)
        projection = dict(P=P, AT=s.projection_at, LAYER=1 + 2 * G, M=M)

        if self.cuda and is_first:
            rows = self.vector_RVD.shape[1]
            cuda["form_vectors"]((rows // 16, b.R), (b.theta0_RP, self.vector_RVD, self.vector_inverse_RV, rows))
        elif not self.cuda and not is_first:
            matrix.form_state_weights[(triton.cdiv(H * H, 2048), U, G)](
                *params, middle, **gates, X=X, H=H, R=R, MIDDLE=W, BLOCK=2048, num_warps=4
            )
        cell.read_inputs[(G * triton.cdiv(H, k["input_cols"]), U)](
            *params, b.token_SUN, b.features_UF, self.input_UNX, self.inverse_UN, self.gate_UN4H, U,
            **gates, D=D, F=s.F, H=H, N=N, R=R, XB=XB, NB=NB, BJ=k["input_cols"], UNIT=s.unit_norm, **fresh,
            num_warps=k["input_warps"],
        )  # fmt: skip
        if self.cuda:
            cuda["lstm_forward"](grid_cells, (*params, self.gate_UN4H, self.cell_UNH, self.state_UNH, U, clusters))
        else:
            for t in range(s.T):
                cell.cell_forward[(triton.cdiv(H, k["forward_cols"]), U)](
                    *working, middle, self.gate_UN4H, self.cell_UNH, self.state_UNH, t, U,
                    X=X, H=H, B=s.B, N=N, G=G, R=R, MIDDLE=W, BB=BB, BJ=k["forward_cols"], BK=k["forward_depth"],
                    GRU=s.is_gru, FIRST=t == 0, **fresh, num_warps=k["forward_warps"], num_stages=k["forward_stages"],
                )  # fmt: skip
        matrix.project[(triton.cdiv(N, k["project_places"]), U)](
            *params, self.state_UNH, self.output_UND,
            **projection, D=D, H=H, N=N, DB=DB, BN=k["project_places"], BK=64, **fresh,
            num_warps=k["project_warps"],
        )  # fmt: skip
        if self.cuda:
            cuda["attend_words"](
                (k["splits"], U),
                (*params, self.vector_RVD, self.vector_RVD.shape[1], self.output_UND, self.part_sum, self.part_peak,
                 self.part_total),
            )  # fmt: skip
        else:
            embedding.attend[(k["splits"], U)](
                *params, self.output_UND, self.part_sum, self.part_peak, self.part_total,
                P=P, AT=s.output_at, LAYER=table, M=M, V=s.V, D=D, N=N, D1=D1, D2=D2, NB=NB,
                BV=k["attend_words"], SPLITS=k["splits"], UNIT=s.unit_norm, **fresh,
                num_warps=k["attend_warps"], num_stages=k["attend_stages"],
            )  # fmt: skip
        matrix.project_back[(triton.cdiv(N, k["back_places"]), U)](
            *params, b.target_SUN, b.share_SU, self.part_sum, self.part_peak, self.part_total,
            self.log_sum_UN, self.output_grad_UND, self.state_grad_UNH, U,
            TABLE=s.output_at, TABLE_LAYER=table, **projection, D=D, H=H, N=N, DB=DB, BN=k["back_places"], BK=64,
            SPLITS=k["splits"], UNIT=s.unit_norm, **fresh, num_warps=k["back_warps"],
        )  # fmt: skip
        if self.cuda:
            cuda["lstm_backward"](
                grid_cells, (*params, self.gate_UN4H, self.cell_UNH, self.state_grad_UNH, U, clusters)
            )
        else:
            for t in reversed(range(s.T)):
                cell.cell_backward[(triton.cdiv(H, k["backward_cols"]), U)](
                    *working, middle, self.gate_UN4H, self.cell_UNH, self.state_grad_UNH, self.carried_UBH, t, U,
                    X=X, H=H, B=s.B, N=N, G=G, R=R, MIDDLE=W, BB=BB, BJ=k["backward_cols"], BK=k["backward_depth"],
                    GRU=s.is_gru, FIRST=t == 0, LAST=t == s.T - 1, **fresh,
                    num_warps=k["backward_warps"], num_stages=k["backward_stages"],
                )  # fmt: skip
        cell.input_gradients[(triton.cdiv(N, k["input_places"]), U)](
            *params, self.gate_UN4H, self.input_UNX, self.inverse_UN, self.input_grad_UND,
            **gates, D=D, X=X, H=H, N=N, G=G, R=R, DB=DB, NB=NB, BN=k["input_places"], BK=64, UNIT=s.unit_norm, **fresh,
            num_warps=k["input_grad_warps"],
        )  # fmt: skip
        stepping = (b.scale_UM, b.run_U, *at_work, b.rate_R, b.keep_R)
        blocks = dict(P=P, M=M, SLOTS=self.slots, N=N, NB=NB, BR=k["matrix_rows"], BC=k["matrix_cols"])
        if self.cuda:
            cuda["update_gates"](
                (self.grid_gates, U),
                (b.delta_UP, *stepping, self.input_UNX, self.state_UNH, self.gate_UN4H, self.squares),
            )
        else:
            matrix.update_matrix[(self.grid_gates, U)](
                b.delta_UP, *stepping, self.input_UNX, self.state_UNH, self.gate_UN4H, self.squares, **blocks,
                AT=s.gates_at, LAYER=1, SLOT=self.slot_gates, X=X, K=H, C=H, STRIDE=4 * H, SHIFT=s.B, GRU=s.is_gru, **fresh,
                num_warps=k["matrix_warps"],
            )  # fmt: skip
        matrix.update_matrix[(self.grid_projection, U)](
            b.delta_UP, *stepping, self.input_UNX, self.state_UNH, self.output_grad_UND, self.squares, **blocks,
            AT=s.projection_at, LAYER=1 + 2 * G, SLOT=self.slot_projection, X=0, K=H, C=D, STRIDE=D, SHIFT=0, GRU=False, **fresh,
            num_warps=k["matrix_warps"],
        )  # fmt: skip
        tables = [(0, 0, 0, True)] if s.tied else [(0, 0, 0, False), (s.output_at, table, self.slot_output, True)]
        for at, layer, slot, dense in tables:
            if dense and self.cuda:
                cuda["update_table_dense"](
                    (k["table_slices"], U),
                    (b.delta_UP, b.theta0_RP, *stepping, b.target_SUN, b.share_SU, self.output_UND, self.log_sum_UN,
                     self.vector_RVD, self.vector_inverse_RV, self.vector_RVD.shape[1], self.squares, U),
                )  # fmt: skip
                continue
            embedding.update_table[(self.grid_table, U)](
                b.delta_UP, b.theta0_RP, *stepping, b.target_SUN, b.share_SU, self.output_UND, self.log_sum_UN, self.squares, U,
                P=P, AT=at, LAYER=layer, M=M, SLOTS=self.slots, SLOT=slot, V=s.V, D=D, N=N, D1=D1, D2=D2, N1=N1, N2=N2,
                BV=k["table_words"], TILES=k["table_tiles"], DENSE=dense, UNIT=s.unit_norm, **fresh,
                num_warps=k["table_warps"], num_stages=k["table_stages"],
            )  # fmt: skip
        embedding.update_read[(self.grid_read, U)](
            b.delta_UP, b.run_U, *at_work, b.rate_R, b.token_SUN, self.input_grad_UND, self.squares, U,
            P=P, SLOTS=self.slots, SLOT=self.slot_read, D=D, N=N, DB=DB, NB=NB, BN=16, **how, num_warps=4,
        )  # fmt: skip
        matrix.clip_scale[(U,)](
            self.squares, self.slot_layer, b.radius_RM, b.clip_kind_R, b.run_U, *at_work, b.scale_UM, b.unclipped_U, b.square_UM,
            SLOTS=self.slots, SB=triton.next_power_of_2(self.slots), M=M,
        )  # fmt: skip
        b.step.add_(1)


def _recorded(take: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record one local step as a CUDA graph and return the graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        take()
    return graph


def _two_blocks(size: int) -> tuple[int, int]:
    """Return two powers of two whose sum is at least `size`; each is at least 16, but the second may be 0.

    Examples: 96 = 64 + 32, 80 = 64 + 16.
    """
    whole = max(16, triton.next_power_of_2(size))
    if size == whole or size <= 32:
        return whole, 0
    rest = max(16, triton.next_power_of_2(size - whole // 2))
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)


def _blocks(buffers: Buffers, tuning: dict[str, int]) -> dict[str, int]:
    """Return block sizes by name: those that were fastest on an H200, smaller for a small model.

    Args:
        buffers: The buffers of the chunk.
        tuning: Block sizes that replace the defaults.
    """
    s = buffers.sizes
    fine, cuda = buffers.delta_UP.dtype == torch.float32, tuning.get("cuda", cuda_kernels.supported(buffers))
    H, D = (max(16, triton.next_power_of_2(size)) for size in (s.H, s.D))
    V = max(16, triton.next_power_of_2(s.V))
    return {
        "splits": 4 if fine else 5 if cuda else 2,
        "fresh_words": 48,
        "attend_words": 80 if cuda else min(V, 32 if fine else 64),
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
        "project_places": 64,
        "project_warps": 4,
        "back_places": 64,
        "back_warps": 4,
        "input_places": 64 if fine else 128,
        "input_grad_warps": 4 if fine else 8,
        "matrix_rows": min(32 if fine else 64, H),
        "matrix_cols": min(64 if fine else 128, H, D),
        "matrix_warps": 4,
        "cuda": int(cuda),
        "table_slices": min(10, -(-s.V // 64)),
        "dense_warps": 4,
        "dense_tiles": 1,
        "dense_blocks": 4,
        "attend_blocks": 3,
        "clusters": 0,
        "gates_warps": 6,
        "gates_blocks": 2,
        **tuning,
    }
