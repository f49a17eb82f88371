// The update of a word table of one user, delta <- c * keep * delta - eta * gradient. D must be a multiple of 32, N of
// 16.
//
// A warp handles TILES * 16 words at a time, and copies the next words meanwhile. The same four threads read, compute
// and write a word: thread q has the columns 32 k + 8 q to 32 k + 8 q + 7 of rows g and g + 8. These are the thread's
// values of the first factor in the product for the logits. The columns of the outputs are reordered in shared memory
// so that the product for the gradient gives the thread the same columns. In the first local step delta is zero, and
// all users of a run have the same word vectors, which `form_vectors` (attend.cu) has computed. Grid: (SLICES, U).
// Block: 32 * WARPS threads.
// Compile-time constants: P, AT, LAYER, M, V, D, N, UNIT (as in table_kernels.py), SLOTS, SLOT, SLICES, WARPS, TILES,
// BLOCKS_PER_SM, FRESH. `update_table` in table_kernels.py computes the same in Triton.

#define LOG2_E 1.4426950408889634f
#define WORDS (16 * TILES)
#define ROW_BYTES (2 * D + 16)       // per row of the outputs in shared memory; 16 extra bytes avoid bank conflicts
#define TILE_BYTES (WORDS * 2 * D)
#define BLOCKS (D / 32)
#define STEPS (N / 16)
// Buffers per warp. With FRESH: the word vectors. Otherwise: theta0, delta of these words, and delta of the next words.
#define BUFFERS (FRESH ? 1 : 3)
#define COPIES (WARPS * BUFFERS * TILE_BYTES)
#define PART (TILES == 1 ? STEPS : (STEPS + 1) / 2)  // groups of 16 positions whose logits are in registers together

KERNEL __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) update_table_dense(
    bf16* delta, const bf16* theta0, const float* scale, const int* run, const int* step, const int* num_steps,
    const float* rate, const float* keep, const int* targets, const float* share, const bf16* output,
    const float* log_sum, const bf16* vectors, const float* inverses, int rows, double* squares, int U
) {
    SHARED_MEMORY(memory);
    const int u = blockIdx.y, now = step[0];
    if (now >= num_steps[u]) return;
    unsigned char* of_outputs = memory + COPIES;
    float* lse = (float*)(of_outputs + N * ROW_BYTES);
    int* target = (int*)(lse + N);
    double* parts = (double*)(target + N);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u32 outputs = shared_address(of_outputs), copies = shared_address(memory) + warp * BUFFERS * TILE_BYTES;
    const u32 mbarrier = shared_address(parts + WARPS) + 8 * warp;
    const i64 of_run = run[u];
    const float c = scale[u * M + LAYER], left = c * keep[of_run];
    const float eta = rate[of_run] * share[(i64)now * U + u];

    const int tiles = (V + WORDS - 1) / WORDS, each = (tiles + SLICES - 1) / SLICES;
    const int first = blockIdx.x * each, end = first + each < tiles ? first + each : tiles;
    bf16* of_delta = delta + (i64)u * P + AT;
    const bf16* of_start = theta0 + of_run * P + AT;
    const bf16* of_vectors = vectors + of_run * rows * D;
    // One lane starts the copy of a tile: theta0 and delta, or with FRESH the word vectors.
    const auto copy_words = [&](int tile, int buffer) {
        if (lane || tile >= end) return;
        const int left = V - tile * WORDS;
        const u32 bytes = (left < WORDS ? left : WORDS) * 2 * D;
        expect_bytes(mbarrier, FRESH ? bytes : 2 * bytes);
        copy_bulk(copies, (FRESH ? of_vectors : of_start) + (i64)tile * WORDS * D, bytes, mbarrier);
        if (!FRESH) copy_bulk(copies + (1 + buffer) * TILE_BYTES, of_delta + (i64)tile * WORDS * D, bytes, mbarrier);
    };
    if (lane == 0) {
        init_mbarrier(mbarrier);
        fence_mbarrier_init();
    }
    copy_words(first + warp, 0);
    for (int piece = threadIdx.x; piece < N * (D / 8); piece += 32 * WARPS) {
        const int n = piece / (D / 8), chunk = piece % (D / 8);
        const Quad v = load_kept(output + ((i64)u * N + n) * D + chunk * 8);
        u32* to = (u32*)(of_outputs + n * ROW_BYTES) + (chunk >> 2) * 16 + (chunk & 3);
        to[0] = v.x;
        to[4] = v.y;
        to[8] = v.z;
        to[12] = v.w;
    }
    for (int n = threadIdx.x; n < N; n += 32 * WARPS) {
        const int word = targets[((i64)now * U + u) * N + n];
        target[n] = word;
        // At positions without a target the log of the sum is so large that every probability is 0.
        lse[n] = word >= 0 ? log_sum[(i64)u * N + n] * LOG2_E : 1e30f;
    }
    block_barrier();
    int mine[(N + 31) / 32];
#pragma unroll
    for (int k = 0; k < (N + 31) / 32; k++) mine[k] = 32 * k + lane < N ? target[32 * k + lane] : -1;

    const u32 by_row = outputs + (lane & 7) * ROW_BYTES + (lane >> 3) * 16;              // four blocks of columns
    const u32 by_column = outputs + (lane & 15) * ROW_BYTES + (lane >> 4) * 16;          // two blocks of 8 positions, two of columns
    double square = 0.0;
    int parity = 0;

#pragma unroll 1
    for (int tile = first + warp; tile < end; tile += WARPS) {
        const int word0 = tile * WORDS;
        const u32 of_deltas = copies + (1 + parity) * TILE_BYTES;
        u32 vector[TILES][2 * BLOCKS][4];
        float inverse[TILES][2], outward[TILES][2];
        wait_mbarrier(mbarrier, parity);
        parity ^= 1;
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = 16 * m + 8 * r + g;
                float w[BLOCKS][8], sum = 0.0f;
#pragma unroll
                for (int k = 0; k < BLOCKS; k++) {
                    // Word vectors from `form_vectors` have their pieces in the order of `piece_at` (attend.cu).
                    const int piece = 4 * k + (FRESH ? q ^ ((row >> 1) & 3) : q);
                    const Quad start = load_shared(copies + row * 2 * D + piece * 16);
                    const u32 a[4] = {start.x, start.y, start.z, start.w};
                    if (FRESH) {
#pragma unroll
                        for (int i = 0; i < 4; i++) vector[m][2 * k + (i >> 1)][r + 2 * (i & 1)] = a[i];
                        continue;
                    }
                    const Quad old = load_shared(of_deltas + row * 2 * D + piece * 16);
                    const u32 b[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        w[k][2 * i] = low(a[i]) + c * low(b[i]);
                        w[k][2 * i + 1] = high(a[i]) + c * high(b[i]);
                        sum += w[k][2 * i] * w[k][2 * i];
                        sum += w[k][2 * i + 1] * w[k][2 * i + 1];
                    }
                }
                outward[m][r] = 0.0f;
                inverse[m][r] = 1.0f;
                if (FRESH) {
                    if (UNIT && word0 + row < V) inverse[m][r] = inverses[of_run * rows + word0 + row];
                    continue;
                }
                if (UNIT) {
                    sum += exchange(sum, 1);
                    sum += exchange(sum, 2);
                    inverse[m][r] = 1.0f / square_root(sum > 1e-24f ? sum : 1e-24f);
                }
#pragma unroll
                for (int k = 0; k < BLOCKS; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        vector[m][2 * k + (i >> 1)][r + 2 * (i & 1)] =
                            pack(w[k][2 * i] * inverse[m][r], w[k][2 * i + 1] * inverse[m][r]);
            }
        warp_barrier();  // All lanes must have read the vectors before the next copy overwrites them.
        copy_words(tile + WARPS, parity);
        bool here = false;
#pragma unroll
        for (int k = 0; k < (N + 31) / 32; k++) here |= (u32)(mine[k] - word0) < (u32)WORDS;
        const bool any = any_lane(here);

        // The gradient with respect to the logits, 16 positions at a time: the first factor in the product for the
        // gradient.
        u32 dlogit[TILES][STEPS][4];
#pragma unroll
        for (int begin = 0; begin < STEPS; begin += PART) {
            float logits[TILES][2 * PART][4] = {};
#pragma unroll
            for (int k = 0; k < BLOCKS; k++)
#pragma unroll
                for (int j = 0; j < 2 * PART; j += 2) {
                    if (begin + j / 2 >= STEPS) continue;
                    u32 o[2][4];
                    load_matrices(o[0], by_row + (16 * begin + 8 * j) * ROW_BYTES + k * 64);
                    load_matrices(o[1], by_row + (16 * begin + 8 * (j + 1)) * ROW_BYTES + k * 64);
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int m = 0; m < TILES; m++) {
                            multiply_add(logits[m][j], vector[m][2 * k + half], o[0][2 * half], o[0][2 * half + 1]);
                            multiply_add(logits[m][j + 1], vector[m][2 * k + half], o[1][2 * half], o[1][2 * half + 1]);
                        }
                }
#pragma unroll
            for (int s = begin; s < begin + PART && s < STEPS; s++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int n = 16 * s + 8 * j + 2 * q;
                    const float lse0 = lse[n], lse1 = lse[n + 1];
#pragma unroll
                    for (int m = 0; m < TILES; m++)
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            const float* z = logits[m][2 * (s - begin) + j] + 2 * r;
                            float p0 = exp2_(z[0] * LOG2_E - lse0), p1 = exp2_(z[1] * LOG2_E - lse1);
                            if (any) {
                                const int word = word0 + 16 * m + 8 * r + g;
                                if (target[n] == word) p0 -= 1.0f;
                                if (target[n + 1] == word) p1 -= 1.0f;
                            }
                            outward[m][r] += p0 * z[0];
                            outward[m][r] += p1 * z[1];
                            dlogit[m][s][r + 2 * j] = pack(p0, p1);
                        }
                }
        }
        float pace[TILES][2], sum[TILES][2] = {};
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                outward[m][r] += exchange(outward[m][r], 1);
                outward[m][r] += exchange(outward[m][r], 2);
                pace[m][r] = eta * inverse[m][r];
                outward[m][r] = UNIT ? outward[m][r] * pace[m][r] : 0.0f;
            }
#pragma unroll
        for (int k = 0; k < BLOCKS; k++) {
            float gradient[TILES][4][4] = {};
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    u32 o[4];
                    load_transposed(o, by_column + 16 * s * ROW_BYTES + k * 64 + j * 16);
#pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        multiply_add(gradient[m][j], dlogit[m][s], o[0], o[1]);
                        multiply_add(gradient[m][j + 1], dlogit[m][s], o[2], o[3]);
                    }
                }
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int row = 16 * m + 8 * r + g, word = word0 + row;
                    Quad old = {};
                    if (!FRESH) old = load_shared(of_deltas + row * 2 * D + 64 * k + 16 * q);
                    const u32 b[4] = {old.x, old.y, old.z, old.w};
                    u32 stored[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const u32 w = vector[m][2 * k + (i >> 1)][r + 2 * (i & 1)];
                        float new0 = outward[m][r] * low(w) - pace[m][r] * gradient[m][i][2 * r];
                        float new1 = outward[m][r] * high(w) - pace[m][r] * gradient[m][i][2 * r + 1];
                        if (!FRESH) {
                            new0 += left * low(b[i]);
                            new1 += left * high(b[i]);
                        }
                        stored[i] = pack(new0, new1);
                        sum[m][r] += low(stored[i]) * low(stored[i]);
                        sum[m][r] += high(stored[i]) * high(stored[i]);
                    }
                    if (word < V) *(Quad*)(of_delta + (i64)word * D + q * 8 + 32 * k) = Quad{stored[0], stored[1], stored[2], stored[3]};
                }
        }
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (word0 + 16 * m + 8 * r + g < V) square += sum[m][r];
        if (!FRESH) warp_barrier();  // All lanes must have read delta again before a later copy overwrites it.
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) square += exchange(square, lanes);
    if (lane == 0) parts[warp] = square;
    block_barrier();
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (int k = 0; k < WARPS; k++) total += parts[k];
        squares[(i64)u * SLOTS + SLOT + blockIdx.x] = total;
    }
}
