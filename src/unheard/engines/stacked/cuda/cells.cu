// The LSTM cell of one user, all time steps of a direction in one launch, for H = 256 and B = 8.
//
// A cluster of four blocks keeps the user's recurrent matrix [256, 4 * 256] in registers, so that it is read once per
// direction and not once per time step. theta = theta0 + c * delta is computed while the matrix is loaded. Between time
// steps the blocks send the state (forward) or parts of its gradient (backward) to each other's shared memory; an
// mbarrier counts the bytes that have arrived. Two alternating buffers are enough: a block sends message k + 2 only
// after it has received message k + 1 of every warp, and a warp sends message k + 1 only after all warps of its block
// (backward) or the warp itself (forward) have read message k. So message k has been read when message k + 2 overwrites
// it. Each cluster handles every n-th user, and copies the next user's matrix while the time steps of the current user
// run. In the first local step the matrix is the same for all users of a run, and stays in the registers from user to
// user.
// Grid: (4 * clusters). Block: 256 threads. Compile-time constants: P, AT, M, X, T (as in kernels.py), FRESH.
// cell_kernels.py computes the same in Triton, one time step per launch.

#define H 256
#define B 8
#define N (B * T)
#define R (X + H + 1)
#define COLUMNS 64   // columns of the state per block; each warp has 8 of them
#define THREADS 256

// Returns theta0 + c * delta for a pair; in the first local step theta0.
INLINE u32 weight_of(u32 start, u32 change, float c) { return FRESH ? start : moved(start, change, c); }

#define STATE_STRIDE 576        // bytes per row of the state in shared memory; 64 extra bytes avoid bank conflicts
#define STATE_BYTES (B * STATE_STRIDE)
// Bytes per position of the results in shared memory. They stay there until the last time step, and are then copied to
// global memory.
#define GATES_STRIDE (4 * 2 * COLUMNS + 64)
#define CELLS_STRIDE (4 * COLUMNS + 16)
#define STATES_STRIDE (2 * COLUMNS + 16)

// Returns the first of the users u, u + clusters, u + 2 * clusters ... who takes this local step; U or more if none
// does.
INLINE int next_user(int u, int U, int clusters, int now, const int* num_steps) {
    while (u < U && now >= num_steps[u]) u += clusters;
    return u;
}

// Copies rows of `BYTES` bytes from shared memory to global memory, 16 bytes at a time.
template <int BYTES> INLINE void write_rows(const unsigned char* from, int stride, void* to, int rows, int row_bytes) {
    for (int piece = threadIdx.x; piece < rows * (BYTES / 16); piece += THREADS) {
        const int row = piece / (BYTES / 16), chunk = piece % (BYTES / 16);
        *(Quad*)((unsigned char*)to + (i64)row * row_bytes + chunk * 16) = *(const Quad*)(from + row * stride + chunk * 16);
    }
}

// Initialises two mbarriers, one for messages with an even number and one for messages with an odd number.
INLINE void open_exchange(u32 mbarriers) {
    if (threadIdx.x == 0) {
        init_mbarrier(mbarriers);
        init_mbarrier(mbarriers + 8);
        fence_mbarrier_init();
    }
    cluster_barrier();
}

// The forward pass copies the matrix in stages of STAGE_ROWS rows. A stage has the block's columns of the four gates,
// first of delta and then of theta0.
#define STAGE_ROWS 32
#define STAGES 4
#define GATE_STAGE (STAGE_ROWS * 2 * COLUMNS)
#define HALF_STAGE (4 * GATE_STAGE)

INLINE void copy_stage(u32 to, const bf16* delta, const bf16* theta0, int stage, int rank) {
    const int row = threadIdx.x >> 3, chunk = threadIdx.x & 7;  // 8 columns per chunk
    const int swizzle = ((row >> 3) * 2 + (row & 1)) & 7;       // puts the eight rows of a matrix into different banks
#pragma unroll
    for (int gate = 0; gate < 4; gate++) {
        const u32 there = to + gate * GATE_STAGE + row * 2 * COLUMNS + ((chunk ^ swizzle) * 16);
        const i64 from = (i64)gate * R * H + (i64)(X + stage * STAGE_ROWS + row) * H + rank * COLUMNS + chunk * 8;
        if (!FRESH) copy_16(there, delta + from);
        copy_16(there + HALF_STAGE, theta0 + from);
    }
    end_copies();
}

// Computes h_t and c_t for all t. `gates` [U, N, 4, H] holds x W + b before, and the values of the gates afterwards.
// Each warp of a block has 8 columns. Rows 0-7 and 8-15 of its first product are the gates i and f; of its second, g
// and o.
KERNEL IN_CLUSTERS __launch_bounds__(THREADS, 1) lstm_forward(
    const bf16* delta, const bf16* theta0, const float* scale, const int* run, const int* step, const int* num_steps,
    bf16* gates, float* cells, bf16* states, int U, int clusters
) {
    SHARED_MEMORY(memory);
    const int rank = blockIdx.x & 3, now = step[0];
    int u = next_user(blockIdx.x >> 2, U, clusters, now, num_steps);
    if (u >= U) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const bool odd = g & 1;
    const u32 stages = shared_address(memory), state = stages + STAGES * 2 * HALF_STAGE;
    unsigned char* out_gates = memory + STAGES * 2 * HALF_STAGE + 2 * STATE_BYTES;
    unsigned char* out_cells = out_gates + N * GATES_STRIDE;
    unsigned char* out_states = out_cells + N * CELLS_STRIDE;
    const u32 mbarriers = shared_address(out_states + N * STATES_STRIDE);
    const int column = warp * 8 + g;                     // column, in the block, of the values that this thread computes
    const int row = 2 * q + odd, pair = column & ~1;     // row and first column of the pairs that it loads and stores
    const u32 place = state + row * STATE_STRIDE + (rank * COLUMNS + warp * 8) * 2;
    int message = 0, loaded = -1;  // the number of the next message; the run whose matrix is in the registers
    u32 weight[2][16][4];

    open_exchange(mbarriers);
    if (!FRESH)
#pragma unroll
        for (int s = 0; s < STAGES; s++)
            copy_stage(stages + s * 2 * HALF_STAGE, delta + (i64)u * P + AT, theta0 + (i64)run[u] * P + AT, s, rank);
    while (true) {
        const bf16* of_delta = delta + (i64)u * P + AT;
        const bf16* of_start = theta0 + (i64)run[u] * P + AT;
        if (!FRESH || run[u] != loaded) {
            loaded = run[u];
            if (FRESH)
#pragma unroll
                for (int s = 0; s < STAGES; s++) copy_stage(stages + s * 2 * HALF_STAGE, of_delta, of_start, s, rank);
            const float c[4] = {scale[u * M + 1], scale[u * M + 3], scale[u * M + 5], scale[u * M + 7]};
#pragma unroll
            for (int s = 0; s < 8; s++) {
                if (s <= 8 - STAGES) await_copies<STAGES - 1>();
                else if (s == 5) await_copies<2>();
                else if (s == 6) await_copies<1>();
                else await_copies<0>();
                block_barrier();
                const u32 here = stages + (s % STAGES) * 2 * HALF_STAGE;
#pragma unroll
                for (int e = 0; e < 2; e++)
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const int matrix = lane >> 3, i = lane & 7;
                        const int k_row = 8 * (i >> 1) + (i & 1) + 4 * e + 2 * (matrix >> 1);
                        const u32 at = here + (2 * m + (matrix & 1)) * GATE_STAGE + k_row * 2 * COLUMNS + (warp ^ i) * 16;
                        u32 change[4] = {}, start[4];
                        if (!FRESH) load_transposed(change, at);
                        load_transposed(start, at + HALF_STAGE);
#pragma unroll
                        for (int k = 0; k < 4; k++)
                            weight[m][2 * s + e][k] = weight_of(start[k], change[k], c[2 * m + (k & 1)]);
                    }
                block_barrier();
                if (s + STAGES < 8) copy_stage(here, of_delta, of_start, s + STAGES, rank);
            }
        }
        const int next = next_user(u + clusters, U, clusters, now, num_steps);
        if (!FRESH && next < U)  // The copies run during the time steps below.
#pragma unroll
            for (int s = 0; s < STAGES; s++)
                copy_stage(stages + s * 2 * HALF_STAGE, delta + (i64)next * P + AT, theta0 + (i64)run[next] * P + AT, s, rank);

        const u32* of_gates = (const u32*)(gates + (i64)u * N * 4 * H + rank * COLUMNS);
        u32 given[4];
#pragma unroll
        for (int k = 0; k < 4; k++) given[k] = of_gates[((row * 4 + k) * H + pair) >> 1];
        float cell[2] = {0.0f, 0.0f};
#pragma unroll 1
        for (int t = 0; t < T; t++) {
            float even[2][4], odds[2][4] = {};
#pragma unroll
            for (int m = 0; m < 2; m++) {
                unpaired(given[2 * m], odd, even[m][0], even[m][1]);
                unpaired(given[2 * m + 1], odd, even[m][2], even[m][3]);
            }
            if (t + 1 < T)
#pragma unroll
                for (int k = 0; k < 4; k++) given[k] = of_gates[((((t + 1) * B + row) * 4 + k) * H + pair) >> 1];
            if (t) {
                const int last = message - 1;
                wait_mbarrier(mbarriers + (last & 1) * 8, (last >> 1) & 1);
                const u32 here = state + (last & 1) * STATE_BYTES + g * STATE_STRIDE + q * 16;
#pragma unroll
                for (int s = 0; s < 8; s++) {
                    const Quad h = load_shared(here + s * 64);
                    multiply_add(even[0], weight[0][2 * s], h.x, h.y);
                    multiply_add(even[1], weight[1][2 * s], h.x, h.y);
                    multiply_add(odds[0], weight[0][2 * s + 1], h.z, h.w);
                    multiply_add(odds[1], weight[1][2 * s + 1], h.z, h.w);
                }
            }
            float i[2], f[2], new_[2], o[2], h[2];
#pragma unroll
            for (int b = 0; b < 2; b++) {
                i[b] = sigmoid(even[0][b] + odds[0][b]);
                f[b] = sigmoid(even[0][2 + b] + odds[0][2 + b]);
                new_[b] = tanh_(even[1][b] + odds[1][b]);
                o[b] = sigmoid(even[1][2 + b] + odds[1][2 + b]);
                cell[b] = f[b] * cell[b] + i[b] * new_[b];
                h[b] = o[b] * tanh_(cell[b]);
            }
            const u32 h_pair = paired(h[0], h[1], odd);
            if (t + 1 < T) {
                const u32 mbarrier = mbarriers + (message & 1) * 8;
                if (threadIdx.x == 0) expect_bytes(mbarrier, 2 * B * H);
                // Four threads have the same 16 bytes. Each of them sends them to one of the four blocks.
                store_async(in_block(place + (message & 1) * STATE_BYTES, g >> 1), gathered(h_pair, lane), in_block(mbarrier, g >> 1));
                message++;
            }
            u32* of_row = (u32*)(out_gates + (t * B + row) * GATES_STRIDE) + (pair >> 1);
            of_row[0] = paired(i[0], i[1], odd);
            of_row[COLUMNS / 2] = paired(f[0], f[1], odd);
            of_row[COLUMNS] = paired(new_[0], new_[1], odd);
            of_row[3 * COLUMNS / 2] = paired(o[0], o[1], odd);
            *((u32*)(out_states + (t * B + row) * STATES_STRIDE) + (pair >> 1)) = h_pair;
#pragma unroll
            for (int b = 0; b < 2; b++) ((float*)(out_cells + (t * B + 2 * q + b) * CELLS_STRIDE))[column] = cell[b];
        }
        block_barrier();
#pragma unroll
        for (int k = 0; k < 4; k++)
            write_rows<2 * COLUMNS>(out_gates + k * 2 * COLUMNS, GATES_STRIDE, gates + ((i64)u * N * 4 + k) * H + rank * COLUMNS, N, 4 * H * 2);
        write_rows<4 * COLUMNS>(out_cells, CELLS_STRIDE, cells + (i64)u * N * H + rank * COLUMNS, N, H * 4);
        write_rows<2 * COLUMNS>(out_states, STATES_STRIDE, states + (i64)u * N * H + rank * COLUMNS, N, H * 2);
        block_barrier();
        if (next >= U) break;
        u = next;
    }
    cluster_barrier();  // A block must not end while other blocks may still send to it.
}

// In the backward pass the matrix of a thread consists of 32 parts of 8 columns of one row: rows g and g + 8 of the
// warp's two tiles, four gates, two blocks of 32 columns. Shared memory has room for PREFETCHED of them, each with
// delta and theta0; the other parts are loaded directly into registers.
#define PREFETCHED 18
#define PARTIAL_BYTES (4 * COLUMNS * B * 4)  // bytes of a message: a float from each block for each state and sequence
INLINE i64 part_at(int part, int rank, int warp, int g, int q) {
    const int r = part & 1, tile = (part >> 1) & 1, block = (part >> 2) & 1, gate = part >> 3;
    return (i64)gate * R * H + (i64)(X + (2 * warp + tile) * 16 + g + 8 * r) * H + rank * COLUMNS + block * 32 + q * 8;
}
INLINE void copy_parts(u32 to, const bf16* delta, const bf16* theta0, int rank, int warp, int g, int q) {
#pragma unroll
    for (int part = 0; part < PREFETCHED; part++) {
        const i64 from = part_at(part, rank, warp, g, q);
        if (!FRESH) copy_16(to + part * 32 * THREADS, delta + from);
        copy_16(to + part * 32 * THREADS + 16 * THREADS, theta0 + from);
    }
    end_copies();
}
// Writes a part into the registers for two matrix products of 16 columns each: the first product uses the first and
// second pair of every thread, the second product the other two.
INLINE void set_part(u32 (&weight)[2][16][4], int part, Quad start, Quad change, float c) {
    const int r = part & 1, tile = (part >> 1) & 1, s = 2 * (part >> 2);
    weight[tile][s][r] = weight_of(start.x, change.x, c);
    weight[tile][s][2 + r] = weight_of(start.y, change.y, c);
    weight[tile][s + 1][r] = weight_of(start.z, change.z, c);
    weight[tile][s + 1][2 + r] = weight_of(start.w, change.w, c);
}

// Computes the gradients with respect to the gates' sums for all t, from dl/dh of the output in `state_grad` [U, N, H].
// The gradients replace the values in `gates`. A block has the gates of its columns. After a time step it multiplies
// their gradients by its part of the matrix. The result is a part of the gradient of every state of the previous time
// step; the block sends each block the parts for that block's columns. Warp w computes the parts of the states 32 w to
// 32 w + 31, and the gates of the columns 8 w to 8 w + 7 of the block.
KERNEL IN_CLUSTERS __launch_bounds__(THREADS, 1) lstm_backward(
    const bf16* delta, const bf16* theta0, const float* scale, const int* run, const int* step, const int* num_steps,
    bf16* gates, const float* cells, const float* state_grad, int U, int clusters
) {
    SHARED_MEMORY(memory);
    const int rank = blockIdx.x & 3, now = step[0];
    int u = next_user(blockIdx.x >> 2, U, clusters, now, num_steps);
    if (u >= U) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const bool odd = g & 1;
    const u32 partials = shared_address(memory);
    unsigned char* out_gates = memory + 2 * PARTIAL_BYTES;
    const u32 copies = shared_address(out_gates + N * GATES_STRIDE) + threadIdx.x * 16;
    const u32 mbarriers = shared_address(out_gates + N * GATES_STRIDE + PREFETCHED * 32 * THREADS);
    const int column = warp * 8 + g;
    const int row = 2 * q + odd, pair = column & ~1;
    int message = 0, loaded = -1;
    u32 weight[2][16][4];

    open_exchange(mbarriers);
    if (!FRESH) copy_parts(copies, delta + (i64)u * P + AT, theta0 + (i64)run[u] * P + AT, rank, warp, g, q);
    while (true) {
        const bf16* of_delta = delta + (i64)u * P + AT;
        const bf16* of_start = theta0 + (i64)run[u] * P + AT;
        if (!FRESH || run[u] != loaded) {
            loaded = run[u];
            if (FRESH) copy_parts(copies, of_delta, of_start, rank, warp, g, q);
            const float c[4] = {scale[u * M + 1], scale[u * M + 3], scale[u * M + 5], scale[u * M + 7]};
#pragma unroll
            for (int some = PREFETCHED; some < 32; some += 7) {
                Quad change[7] = {}, start[7];
#pragma unroll
                for (int k = 0; k < 7; k++) {
                    if (!FRESH) change[k] = load_once(of_delta + part_at(some + k, rank, warp, g, q));
                    start[k] = load_kept(of_start + part_at(some + k, rank, warp, g, q));
                }
#pragma unroll
                for (int k = 0; k < 7; k++) set_part(weight, some + k, start[k], change[k], c[(some + k) >> 3]);
            }
            await_copies<0>();
#pragma unroll
            for (int part = 0; part < PREFETCHED; part++) {
                Quad change = {};
                if (!FRESH) change = load_shared(copies + part * 32 * THREADS);
                set_part(weight, part, load_shared(copies + part * 32 * THREADS + 16 * THREADS), change, c[part >> 3]);
            }
        }
        const int next = next_user(u + clusters, U, clusters, now, num_steps);
        if (!FRESH && next < U)  // The copies run during the time steps below.
            copy_parts(copies, delta + (i64)next * P + AT, theta0 + (i64)run[next] * P + AT, rank, warp, g, q);

        const u32* of_gates = (const u32*)(gates + (i64)u * N * 4 * H + rank * COLUMNS);
        const float* of_cells = cells + (i64)u * N * H + rank * COLUMNS;
        const float* of_grad = state_grad + (i64)u * N * H + rank * COLUMNS;
        u32 given[4];
        float dh[2], cell[2], before[2], carried[2] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < 4; k++) given[k] = of_gates[((((T - 1) * B + row) * 4 + k) * H + pair) >> 1];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            dh[b] = of_grad[((T - 1) * B + 2 * q + b) * H + column];
            cell[b] = of_cells[((T - 1) * B + 2 * q + b) * H + column];
            before[b] = T > 1 ? of_cells[((T - 2) * B + 2 * q + b) * H + column] : 0.0f;
        }
#pragma unroll 1
        for (int t = T - 1; t >= 0; t--) {
            float i[2], f[2], new_[2], o[2], d[4][2], next_dh[2] = {0.0f, 0.0f}, next_before[2] = {0.0f, 0.0f};
            unpaired(given[0], odd, i[0], i[1]);
            unpaired(given[1], odd, f[0], f[1]);
            unpaired(given[2], odd, new_[0], new_[1]);
            unpaired(given[3], odd, o[0], o[1]);
            if (t) {
#pragma unroll
                for (int k = 0; k < 4; k++) given[k] = of_gates[((((t - 1) * B + row) * 4 + k) * H + pair) >> 1];
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    next_dh[b] = of_grad[((t - 1) * B + 2 * q + b) * H + column];
                    if (t > 1) next_before[b] = of_cells[((t - 2) * B + 2 * q + b) * H + column];
                }
            }
            float squashed[2];
#pragma unroll
            for (int b = 0; b < 2; b++) squashed[b] = tanh_(cell[b]);
            if (t < T - 1) {
                const int last = message - 1;
                wait_mbarrier(mbarriers + (last & 1) * 8, (last >> 1) & 1);
                const float* here = (const float*)(memory + (last & 1) * PARTIAL_BYTES) + column * B + 2 * q;
#pragma unroll
                for (int from = 0; from < 4; from++) {
                    dh[0] += here[from * COLUMNS * B];
                    dh[1] += here[from * COLUMNS * B + 1];
                }
            }
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const float dcell = carried[b] + dh[b] * o[b] * (1.0f - squashed[b] * squashed[b]);
                d[0][b] = dcell * new_[b] * i[b] * (1.0f - i[b]);
                d[1][b] = dcell * before[b] * f[b] * (1.0f - f[b]);
                d[2][b] = dcell * i[b] * (1.0f - new_[b] * new_[b]);
                d[3][b] = dh[b] * squashed[b] * o[b] * (1.0f - o[b]);
                carried[b] = dcell * f[b];
                cell[b] = before[b];
                before[b] = next_before[b];
                dh[b] = next_dh[b];
            }
            u32* of_row = (u32*)(out_gates + (t * B + row) * GATES_STRIDE) + (pair >> 1);
#pragma unroll
            for (int k = 0; k < 4; k++) of_row[k * COLUMNS / 2] = paired(d[k][0], d[k][1], odd);
            if (!t) continue;
            block_barrier();
            float sums[2][2][4] = {};
            const u32 here = shared_address(out_gates + (t * B + g) * GATES_STRIDE) + q * 16;
#pragma unroll
            for (int s = 0; s < 8; s++) {
                const Quad x = load_shared(here + s * 64);
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    multiply_add(sums[tile][0], weight[tile][2 * s], x.x, x.y);
                    multiply_add(sums[tile][1], weight[tile][2 * s + 1], x.z, x.w);
                }
            }
            const u32 mbarrier = mbarriers + (message & 1) * 8;
            if (threadIdx.x == 0) expect_bytes(mbarrier, PARTIAL_BYTES);
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const int state = (2 * warp + tile) * 16 + g, owner = state / COLUMNS;
                const u32 place = partials + (message & 1) * PARTIAL_BYTES + ((rank * COLUMNS + state % COLUMNS) * B + 2 * q) * 4;
#pragma unroll
                for (int r = 0; r < 2; r++)
                    store_async(in_block(place + r * 8 * B * 4, owner), sums[tile][0][2 * r] + sums[tile][1][2 * r],
                                sums[tile][0][2 * r + 1] + sums[tile][1][2 * r + 1], in_block(mbarrier, owner));
            }
            message++;
        }
        block_barrier();
#pragma unroll
        for (int k = 0; k < 4; k++)
            write_rows<2 * COLUMNS>(out_gates + k * 2 * COLUMNS, GATES_STRIDE, gates + ((i64)u * N * 4 + k) * H + rank * COLUMNS, N, 4 * H * 2);
        block_barrier();
        if (next >= U) break;
        u = next;
    }
    cluster_barrier();  // A block must not end while other blocks may still send to it.
}
