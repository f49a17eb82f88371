// The update of the matrix of one gate of one user, delta <- c * keep * delta - eta * z^T gradients, for H = 256.
//
// z [N, X + H + 1] is the input of the matrix: word vectors, states of the previous time step (B positions earlier),
// and 1 for the bias. A block handles all rows of the matrix, 64 columns at a time; a warp handles EACH tiles of 16
// rows. As soon as a tile is stored, the same tile of the next 64 columns is loaded, so that loads overlap with
// computation. Thread q of four handles the columns 32 k + 8 q to 32 k + 8 q + 7 of rows g and g + 8, so that it reads
// and writes 16 bytes at a time. The columns of the gradients are reordered in shared memory so that the product gives
// the thread these columns. Grid: (4, U). Block: 32 * WARPS threads.
// Compile-time constants: P, AT, M, X, T (as in kernels.py), SLOTS, SLOT, WARPS, BLOCKS_PER_SM, FRESH.
// `update_matrix` in matrix_kernels.py computes the same in Triton.

#define H 256
#define B 8
#define N (B * T)
#define R (X + H + 1)
#define STEPS (N / 16)
#define Z_BYTES (2 * (X + H) + 16)   // bytes per row in shared memory; 16 extra bytes avoid bank conflicts
#define G_BYTES (2 * 64 + 16)
#define ROW_TILES ((X + H) / 16)     // tiles of the weight; one more tile has the single row of the bias
#define EACH ((ROW_TILES + WARPS) / WARPS)
#define THREADS (32 * WARPS)
#define GROUPS (H / 64)              // groups of 64 columns

KERNEL __launch_bounds__(THREADS, BLOCKS_PER_SM) update_gates(
    bf16* delta, const float* scale, const int* run, const int* step, const int* num_steps, const float* rate,
    const float* keep, const bf16* inputs, const bf16* states, const bf16* gates, double* squares
) {
    SHARED_MEMORY(memory);
    const int gate = blockIdx.x, u = blockIdx.y;
    if (step[0] >= num_steps[u]) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u32 z = shared_address(memory), grads = z + N * Z_BYTES;
    double* parts = (double*)(memory + N * (Z_BYTES + 2 * G_BYTES));

    // The address of this thread's first 16 bytes: tile `warp`, row g, columns 8 q to 8 q + 7.
    bf16* at = delta + (i64)u * P + AT + ((i64)gate * R + warp * 16 + g) * H + q * 8;
    Quad old[EACH][2][2];
    const auto load_tile = [&](Quad (&to)[2][2], int e, int group) {
        const int tile = warp + WARPS * e;
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                to[r][k] = Quad{0, 0, 0, 0};
                if (!FRESH && (tile < ROW_TILES || (tile == ROW_TILES && r == 0 && g == 0)))
                    to[r][k] = load_once(at + (e * WARPS * 16 + r * 8) * H + group * 64 + k * 32);
            }
    };
    // The gradients of a group of columns are loaded in GRADS turns of 16 bytes per thread.
#define GRADS ((N * 8 + THREADS - 1) / THREADS)
    Quad next[GRADS];
    const auto load_grads = [&](int group) {
#pragma unroll
        for (int k = 0; k < GRADS; k++) {
            const int piece = threadIdx.x + k * THREADS, n = piece >> 3, chunk = piece & 7;
            if (n < N) next[k] = load_kept(gates + (((i64)u * N + n) * 4 + gate) * H + group * 64 + chunk * 8);
        }
    };
    const auto store_grads = [&](int buffer) {
#pragma unroll
        for (int k = 0; k < GRADS; k++) {
            const int piece = threadIdx.x + k * THREADS, n = piece >> 3, chunk = piece & 7;
            if (n >= N) continue;
            u32* to = (u32*)(memory + N * (Z_BYTES + buffer * G_BYTES) + n * G_BYTES) + (chunk >> 2) * 16 + (chunk & 3);
            to[0] = next[k].x;
            to[4] = next[k].y;
            to[8] = next[k].z;
            to[12] = next[k].w;
        }
    };
#pragma unroll
    for (int e = 0; e < EACH; e++) load_tile(old[e], e, 0);

    for (int piece = threadIdx.x; piece < N * (X / 8); piece += THREADS) {
        const int n = piece / (X / 8), chunk = piece % (X / 8);
        copy_16(z + n * Z_BYTES + chunk * 16, inputs + ((i64)u * N + n) * X + chunk * 8);
    }
    for (int piece = threadIdx.x; piece < (N - B) * (H / 8); piece += THREADS) {
        const int n = B + piece / (H / 8), chunk = piece % (H / 8);
        copy_16(z + n * Z_BYTES + 2 * X + chunk * 16, states + ((i64)u * N + n - B) * H + chunk * 8);
    }
    end_copies();
    for (int piece = threadIdx.x; piece < B * (H / 8); piece += THREADS)
        *(Quad*)(memory + (piece / (H / 8)) * Z_BYTES + 2 * X + (piece % (H / 8)) * 16) = Quad{0, 0, 0, 0};
    load_grads(0);
    store_grads(0);
    await_copies<0>();
    block_barrier();

    const int of_run = run[u];
    const float eta = rate[of_run];
    const float c_weight = scale[u * M + 1 + 2 * gate] * keep[of_run], c_bias = scale[u * M + 2 + 2 * gate] * keep[of_run];
    double of_weight = 0.0, of_bias = 0.0;  // squared norms of the stored delta

#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        const u32 here = grads + (group & 1) * N * G_BYTES;
        if (group + 1 < GROUPS) load_grads(group + 1);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int tile = warp + WARPS * e;
            const bool is_bias = tile == ROW_TILES;
            if (tile > ROW_TILES) break;
            float sums[8][4] = {};
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                u32 a[4], b[4][4];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    load_transposed(b[j], here + (16 * s + (lane & 15)) * G_BYTES + (2 * j + (lane >> 4)) * 16);
                if (is_bias) {
                    a[0] = a[2] = g ? 0 : 0x3f803f80u;  // a row of ones
                    a[1] = a[3] = 0;
                } else {
                    load_transposed(a, z + (16 * s + (lane & 7) + 8 * (lane >> 4)) * Z_BYTES + (tile * 2 + ((lane >> 3) & 1)) * 16);
                }
#pragma unroll
                for (int j = 0; j < 8; j++) multiply_add(sums[j], a, b[j >> 1][2 * (j & 1)], b[j >> 1][2 * (j & 1) + 1]);
            }
            const float c = is_bias ? c_bias : c_weight;
            float square = 0.0f;
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const u32 b[4] = {old[e][r][k].x, old[e][r][k].y, old[e][r][k].z, old[e][r][k].w};
                    u32 stored[4];
                    float sum = 0.0f;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float* d = sums[4 * k + i];
                        stored[i] = FRESH ? pack(-eta * d[2 * r], -eta * d[2 * r + 1])
                                          : pack(c * low(b[i]) - eta * d[2 * r], c * high(b[i]) - eta * d[2 * r + 1]);
                        sum += low(stored[i]) * low(stored[i]);
                        sum += high(stored[i]) * high(stored[i]);
                    }
                    if (!is_bias || (r == 0 && g == 0)) {
                        *(Quad*)(at + (e * WARPS * 16 + r * 8) * H + group * 64 + k * 32) =
                            Quad{stored[0], stored[1], stored[2], stored[3]};
                        square += sum;
                    }
                }
            if (is_bias) of_bias += square; else of_weight += square;
            if (group + 1 < GROUPS) load_tile(old[e], e, group + 1);
        }
        if (group + 1 < GROUPS) store_grads((group + 1) & 1);
        block_barrier();
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) {
        of_weight += exchange(of_weight, lanes);
        of_bias += exchange(of_bias, lanes);
    }
    if (lane == 0) {
        parts[2 * warp] = of_weight;
        parts[2 * warp + 1] = of_bias;
    }
    block_barrier();
    if (threadIdx.x < 2) {
        double total = 0.0;
        for (int k = 0; k < WARPS; k++) total += parts[2 * k + threadIdx.x];
        squares[(i64)u * SLOTS + SLOT + 2 * gate + threadIdx.x] = total;
    }
}
