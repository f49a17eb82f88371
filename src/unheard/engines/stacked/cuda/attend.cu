// The softmax of one user over one split of the words, for all N positions, for D and N that are multiples of 32 and 16.
//
// A warp has 16 positions. The block forms the word vectors of N words at a time in shared memory, two per four threads,
// and copies the next ones while the products of the present ones run. The running maximum over tiles is that of
// attention kernels (Milakov and Gimelshein 2018, Dao et al. 2022). Grid: (SPLITS, U). Block: 2 * N threads.
// Compile-time constants: P, AT, LAYER, M, V, D, N, UNIT, SPLITS (stacked/__init__.py).
// table_kernels.py computes the same in Triton.

#define LOG2_E 1.4426950408889634f
#define ROW_BYTES (2 * D + 16)       // of the word vectors in shared memory; 16 more against bank conflicts
#define BLOCKS (D / 32)
#define STEPS (N / 16)
#define TILE_BYTES (N * ROW_BYTES)

#define PIECES (4 * BLOCKS)            // of 16 bytes per thread and tile: two words, delta and theta0
#define THREADS (2 * N)

// Starts to copy two words of a tile per four threads into places of shared memory that only this thread uses.
INLINE void copy_rows(u32 to, const bf16* delta, const bf16* theta0, int word0) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int word = word0 + r * (N / 2) + (threadIdx.x >> 2), safe = word < V ? word : V - 1;
        const i64 from = (i64)safe * D + (threadIdx.x & 3) * 8;
#pragma unroll
        for (int k = 0; k < BLOCKS; k++) {
            copy_16(to + ((r * BLOCKS + k) * 2 * THREADS + threadIdx.x) * 16, delta + from + 32 * k);
            copy_16(to + ((r * BLOCKS + k) * 2 * THREADS + THREADS + threadIdx.x) * 16, theta0 + from + 32 * k);
        }
    }
    end_copies();
}

// The word vectors of what `copy_rows` copied.
INLINE void form_rows(u32 from, unsigned char* to, float c) {
    await_copies<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float w[BLOCKS][8], sum = 0.0f, factor = 1.0f;
#pragma unroll
        for (int k = 0; k < BLOCKS; k++) {
            const Quad old = load_shared(from + ((r * BLOCKS + k) * 2 * THREADS + threadIdx.x) * 16);
            const Quad start = load_shared(from + ((r * BLOCKS + k) * 2 * THREADS + THREADS + threadIdx.x) * 16);
            const u32 a[4] = {start.x, start.y, start.z, start.w}, b[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w[k][2 * i] = low(a[i]) + c * low(b[i]);
                w[k][2 * i + 1] = high(a[i]) + c * high(b[i]);
                sum += w[k][2 * i] * w[k][2 * i];
                sum += w[k][2 * i + 1] * w[k][2 * i + 1];
            }
        }
        if (UNIT) {
            sum += exchange(sum, 1);
            sum += exchange(sum, 2);
            factor = 1.0f / square_root(sum > 1e-24f ? sum : 1e-24f);
        }
        unsigned char* at = to + (r * (N / 2) + (threadIdx.x >> 2)) * ROW_BYTES + (threadIdx.x & 3) * 16;
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
            *(Quad*)(at + 64 * k) = Quad{pack(w[k][0] * factor, w[k][1] * factor), pack(w[k][2] * factor, w[k][3] * factor),
                                         pack(w[k][4] * factor, w[k][5] * factor), pack(w[k][6] * factor, w[k][7] * factor)};
    }
}

KERNEL __launch_bounds__(2 * N, BLOCKS_PER_SM) attend_words(
    const bf16* delta, const bf16* theta0, const float* scale, const int* run, const int* step, const int* num_steps,
    const bf16* output, float* part_sum, float* part_peak, float* part_total
) {
    SHARED_MEMORY(memory);
    const int split = blockIdx.x, u = blockIdx.y;
    if (step[0] >= num_steps[u]) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const bf16* of_delta = delta + (i64)u * P + AT;
    const bf16* of_start = theta0 + (i64)run[u] * P + AT;
    const float c = scale[u * M + LAYER];
    const int tiles = (V + N - 1) / N, each = (tiles + SPLITS - 1) / SPLITS;
    const int first = split * each, end = first + each < tiles ? first + each : tiles;

    u32 o[2 * BLOCKS][4];
    const u32* of_output = (const u32*)(output + ((i64)u * N + warp * 16 + g) * D) + q;
#pragma unroll
    for (int s = 0; s < 2 * BLOCKS; s++)
#pragma unroll
        for (int k = 0; k < 4; k++) o[s][k] = of_output[(k & 1) * 4 * D + s * 8 + (k >> 1) * 4];
    float summed[4 * BLOCKS][4] = {}, peak[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};

    const u32 copies = shared_address(memory) + 2 * TILE_BYTES;
    if (first < end) {
        copy_rows(copies, of_delta, of_start, first * N);
        form_rows(copies, memory, c);
    }
    block_barrier();
#pragma unroll 1
    for (int tile = first; tile < end; tile++) {
        const int buffer = (tile - first) & 1;
        const u32 here = shared_address(memory) + buffer * TILE_BYTES;
        if (tile + 1 < end) copy_rows(copies, of_delta, of_start, (tile + 1) * N);
        float logit[2 * STEPS][4] = {};
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j += 2) {
                u32 w[2][4];
                load_matrices(w[0], here + (8 * j + (lane & 7)) * ROW_BYTES + (lane >> 3) * 16 + k * 64);
                load_matrices(w[1], here + (8 * j + 8 + (lane & 7)) * ROW_BYTES + (lane >> 3) * 16 + k * 64);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    multiply_add(logit[j], o[2 * k + half], w[0][2 * half], w[0][2 * half + 1]);
                    multiply_add(logit[j + 1], o[2 * k + half], w[1][2 * half], w[1][2 * half + 1]);
                }
            }
        if ((tile + 1) * N > V) {
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (tile * N + 8 * j + 2 * q + (i & 1) >= V) logit[j][i] = -1e30f;
        }
        float fade[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float highest = -1e30f;
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j++) highest = larger(highest, larger(logit[j][2 * r], logit[j][2 * r + 1]));
            highest = larger(highest, exchange(highest, 1));
            highest = larger(peak[r], larger(highest, exchange(highest, 2)) * LOG2_E);
            fade[r] = exp2_(peak[r] - highest);
            peak[r] = highest;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    logit[j][2 * r + i] = exp2_(logit[j][2 * r + i] * LOG2_E - highest);
                    sum += logit[j][2 * r + i];
                }
            total[r] = total[r] * fade[r] + sum;
        }
        if (any_lane(fade[0] < 1.0f || fade[1] < 1.0f)) {
#pragma unroll
            for (int j = 0; j < 4 * BLOCKS; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) summed[j][i] *= fade[i >> 1];
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const u32 p[4] = {pack(logit[2 * s][0], logit[2 * s][1]), pack(logit[2 * s][2], logit[2 * s][3]),
                              pack(logit[2 * s + 1][0], logit[2 * s + 1][1]), pack(logit[2 * s + 1][2], logit[2 * s + 1][3])};
#pragma unroll
            for (int j = 0; j < 4 * BLOCKS; j += 2) {
                u32 w[4];
                load_transposed(w, here + (16 * s + (lane & 15)) * ROW_BYTES + (lane >> 4) * 16 + j * 16);
                multiply_add(summed[j], p, w[0], w[1]);
                multiply_add(summed[j + 1], p, w[2], w[3]);
            }
        }
        if (tile + 1 < end) form_rows(copies, memory + (1 - buffer) * TILE_BYTES, c);
        block_barrier();
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += exchange(total[r], 1);
        total[r] += exchange(total[r], 2);
        const i64 at = ((i64)u * SPLITS + split) * N + warp * 16 + 8 * r + g;
        if (q == 0) {
            part_peak[at] = peak[r] / LOG2_E;
            part_total[at] = total[r];
        }
#pragma unroll
        for (int j = 0; j < 4 * BLOCKS; j++) {
            part_sum[at * D + 8 * j + 2 * q] = summed[j][2 * r];
            part_sum[at * D + 8 * j + 2 * q + 1] = summed[j][2 * r + 1];
        }
    }
}
