// Attention of generated rows over q8_0 pages on Hopper GPUs (sm_90a), for heads of 256: the part of every piece of a context
// (pieces.py), which kernel.py adds up.
//
// hopper.py puts before this file GROUP, how many query heads share a key head, PAGE, tokens of a page, and where pieces begin.
// No header is included.
//
// A CTA has a tile: up to 8 rows of a span times the query heads of one key head, and some of the tile's pieces. It takes a piece
// by up to 128 keys: scores, the softmax against the largest score so far, values. What is stored is fetched as it is,
// the next keys and scales while the weights are multiplied with values, the next values while keys are multiplied; it becomes
// float16 on the way into registers, where it is the A operand of the tensor cores:
//
//     scores  [16 keys,   8 queries] = K [16 keys,  256] Q^T [256, 8]: a warp has 16 keys
//     values  [32 dims,   8 queries] = V^T [32 dims, keys] P^T [keys, 8]: a warp has 32 dims
//
// Which column of an operand is which number is free, as long as both operands agree. So a thread takes numbers that lie side by side.
// A query is a column, whose bits depend on no other one. Precision is as in kernel.py: both factors in float16, sums in float32.

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;

constexpr int DIM = 256, GROUPS = DIM / 32;  // numbers of a head, and of those with a scale of their own
constexpr int ROWS = 8;                      // of a tile
constexpr int HALF = (GROUP + 1) / 2, QUERIES = 16 * HALF;  // for an odd group some are nobody's
constexpr int KEYS = 128, BLOCK_PAGES = KEYS / PAGE;
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int QUERY_BYTES = 2 * DIM;
constexpr int WEIGHT_BYTES = 2 * KEYS + 32;  // with a gap, so that threads that read at once read from different banks
constexpr uint32 ALL = 0xffffffffu;
static_assert(KEYS == 16 * WARPS && DIM == 32 * WARPS && BLOCK_PAGES % 4 == 0 && KEYS % PAGE == 0 && THREADS == 16 * PAGE);
static_assert(PAGE % 16 == 0 && THREADS >= KEYS);

// Where each block of 16 bytes lies within its row is such that threads that read at once find theirs in different banks.
struct Shared {
    uint8 k[KEYS][DIM], v[KEYS][DIM];                // block b of key i at b ^ swizzle_k(i), b ^ swizzle_v(i)
    uint16 k_scales[KEYS][GROUPS], v_scales[KEYS][GROUPS];
    uint8 queries[QUERIES][QUERY_BYTES];             // float16; block b of query i at b ^ (i & 1)
    uint8 weights[QUERIES][WEIGHT_BYTES];            // float16
    float of_warps[WARPS][QUERIES];                  // largest scores, then sums of weights
    alignas(16) int pages[2][BLOCK_PAGES];           // of the keys that are fetched next, and of those behind them
    int64 places[QUERIES];                           // where the first part of a query goes
    int seen[QUERIES];                               // how many keys of the lane it sees
    float peaks[QUERIES], shrink[QUERIES];           // the largest score so far, and what sums before it are multiplied by
};

struct Arguments {
    const float* q;
    const uint8 *k, *k_scales, *v, *v_scales;  // scales are float16
    const int* table;
    const int64 *lanes, *starts, *lengths, *bases;
    uint2* parts;  // four float16
    float *peaks, *totals;
    int64 table_stride, q_row, q_head;
    int tiles_per_span, pieces, kv_heads, few;
    float scale;
};

// The score of a key that is not seen.
__device__ __forceinline__ float nothing() { return __int_as_float(0xff800000); }

// Where the thread is. The compiler shall work out what follows from it once more wherever it is asked for, rather than hold it in
// registers through all of the kernel.
struct Thread {
    int at = threadIdx.x, warp, row, quarter;

    __device__ __forceinline__ Thread() {
        asm volatile("" : "+r"(at));
        warp = at / 32, row = at % 32 / 4, quarter = at % 4;
    }
};

__device__ __forceinline__ int swizzle_k(int key) { return (key >> 1 & 1) << 2; }
__device__ __forceinline__ int swizzle_v(int key) { return (key >> 2 & 3) << 1; }

// ------------------------------------------------------------------------------------------------------------------ PTX

__device__ __forceinline__ uint32 shared_address(const void* at) { return (uint32)__cvta_generic_to_shared(at); }

// Wait until the kernel before has ended.
__device__ __forceinline__ void await_turn() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 16 bytes past the L1 cache.
__device__ __forceinline__ void copy(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Zeros where not ``known``.
__device__ __forceinline__ void copy(void* to, const void* from, bool known) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(known ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_one(int* to, const int* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until no more than the last N groups of copies are on their way.
template <int N>
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ uint32 permuted(uint32 x, uint32 y, uint32 order) {
    uint32 z;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(order));
    return z;
}

// Two of four bytes, each an int8 with its sign bit turned, times scales, in float16. A byte becomes the low one of 1024.0.
template <uint32 ORDER>
__device__ __forceinline__ uint32 decoded(uint32 biased, uint32 scales) {
    uint32 x = permuted(biased, 0x64646464u, ORDER);
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0x64806480u));
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(scales));
    return x;
}

constexpr uint32 FIRST = 0x4140u, LAST = 0x4342u;  // of four bytes

__device__ __forceinline__ uint32 halves(float low, float high) {
    uint32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float exp2_of(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// sums [16, 8] += a [16, 16] b [16, 8]
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// -------------------------------------------------------------------------------------------------------------- geometry

__device__ __forceinline__ int piece_of(int key) {
    if (key < MIDDLE_BEGIN) return key / NEAR;
    if (key < FAR_BEGIN) return MIDDLE_FIRST + (key - MIDDLE_BEGIN) / MIDDLE;
    return FAR_FIRST + (key - FAR_BEGIN) / FAR;
}

__device__ __forceinline__ int begin_of(int piece) {
    if (piece < MIDDLE_FIRST) return piece * NEAR;
    if (piece < FAR_FIRST) return MIDDLE_BEGIN + (piece - MIDDLE_FIRST) * MIDDLE;
    return FAR_BEGIN + (piece - FAR_FIRST) * FAR;
}

// Up to KEYS keys of a piece.
struct Block {
    int piece, begin, end;  // end: of the piece, or of all keys

    __device__ __forceinline__ int keys() const { return min(KEYS, end - begin); }
    __device__ __forceinline__ bool last() const { return begin + KEYS >= end; }
};

__device__ __forceinline__ Block first_block(int piece, int all) { return {piece, begin_of(piece), min(begin_of(piece + 1), all)}; }

// The one behind it among the pieces of this CTA.
__device__ __forceinline__ Block next(const Block& block, int all) {
    if (!block.last()) return {block.piece, block.begin + KEYS, block.end};
    return first_block(block.piece + gridDim.z, all);
}

// -------------------------------------------------------------------------------------------------------------- fetching

// Of keys or values: a thread has one block of 16 bytes of a key in each page, and maybe the scales of a key. What nobody has
// written of the last page comes along, with scales of zero, so that it is finite.
template <int (*SWIZZLE)(int)>
__device__ __forceinline__ void fetch(
    uint8 (*to)[DIM], uint16 (*to_scales)[GROUPS], const uint8* from, const uint8* scales, int keys, const int* pages, int kv_heads
) {
    const int within = threadIdx.x / 16, part = threadIdx.x % 16, key = threadIdx.x;
    const uint32 page_stripes = PAGE * kv_heads;  // of these a stripe is what one key has of one head
    uint8* const place = to[within] + 16 * (part ^ SWIZZLE(within));  // no swizzle looks beyond the key's place among 16
    from += (within * kv_heads + blockIdx.y) * DIM + 16 * part;
#pragma unroll
    for (int i = 0; i < BLOCK_PAGES; i += 4) {
        const int4 four = *(const int4*)(pages + i);
        const int page[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (PAGE * (i + j) < keys)
                copy(place + PAGE * (i + j) * DIM, from + (uint64)(uint32)page[j] * (page_stripes * DIM));
    }
    if (key / PAGE * PAGE < keys && key < KEYS) {
        const uint32 stripe = key % PAGE * kv_heads + blockIdx.y;
        const uint64 of_page = (uint64)(uint32)pages[key / PAGE] * (page_stripes * (2 * GROUPS));
        copy(to_scales[key], scales + of_page + stripe * (2 * GROUPS), key < keys);
    }
}

// The queries as float16, zeros where there are none. Query i is of row i / GROUP.
template <int TILES>
__device__ __forceinline__ void take_queries(Shared& shared, const Arguments& given, int64 first, int count) {
    constexpr int TURNS = 8 * TILES * DIM / 4 / THREADS;
    float4 taken[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {  // all are asked for before the first has come
        const int query = (turn * THREADS + threadIdx.x) / (DIM / 4), part = threadIdx.x % (DIM / 4);
        const int64 row = first + query / GROUP, head = blockIdx.y * GROUP + query % GROUP;
        taken[turn] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (query < count) taken[turn] = *(const float4*)(given.q + row * given.q_row + head * given.q_head + 4 * part);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int query = (turn * THREADS + threadIdx.x) / (DIM / 4), part = threadIdx.x % (DIM / 4);
        const float4& x = taken[turn];
        const uint2 both = {halves(x.x * given.scale, x.y * given.scale), halves(x.z * given.scale, x.w * given.scale)};
        *(uint2*)(shared.queries[query] + 16 * ((part >> 1) ^ (query & 1)) + 8 * (part & 1)) = both;
    }
}

// ----------------------------------------------------------------------------------------------------------- multiplying

// Scores of the warp's 16 keys, of which row r of the product is key 2 r, and row 8 + r the one behind it. In four products in turn
// a thread's numbers of a key are 16 side by side; two of these four share a load of scales. Of two blocks that differ in one bit
// of their number only, one in an odd row lies where the other one lies in an even row.
template <int TILES>
__device__ __forceinline__ void multiply_keys(float (&scores)[TILES][4], const Shared& shared) {
    const Thread thread;
    const int row = thread.row, quarter = thread.quarter, key = 16 * thread.warp + 2 * row, odd = row & 1;
    const uint8* const keys = shared.k[key] + 16 * quarter;
    const uint8* const queries = shared.queries[row] + 32 * quarter;
    const uint32 half_word = quarter < 2 ? 0x1010u : 0x3232u;
#pragma unroll 1
    for (int pair = 0; pair < DIM / 128; pair++) {
        uint2 scales_of[2];
#pragma unroll
        for (int i = 0; i < 2; i++) scales_of[i] = *(const uint2*)(shared.k_scales[key + i] + 4 * pair);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            uint4 levels[2];
            uint32 scales[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                levels[i] = *(const uint4*)(keys + i * DIM + 128 * pair + 64 * (side ^ odd));
                scales[i] = permuted(side ? scales_of[i].y : scales_of[i].x, 0, half_word);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32 a[2][4];
#pragma unroll
                for (int step = 0; step < 2; step++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const uint4& four = levels[i];
                        const uint32 biased = (half ? (step ? four.w : four.z) : (step ? four.y : four.x)) ^ 0x80808080u;
                        a[step][i] = decoded<FIRST>(biased, scales[i]);
                        a[step][2 + i] = decoded<LAST>(biased, scales[i]);
                    }
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const uint8* const at = queries + 8 * n * QUERY_BYTES + 256 * pair + 128 * side + 16 * (half ^ odd);
                    const uint4 b = *(const uint4*)at;
                    multiply(scores[n], a[0], b.x, b.y);
                    multiply(scores[n], a[1], b.z, b.w);
                }
            }
        }
    }
}

// Values of the warp's 32 dims, of which a thread has 4 side by side: rows r and 8 + r of both products. Of 16 keys it has four,
// side by side too.
template <int TILES>
__device__ __forceinline__ void multiply_values(float (&values)[2][TILES][4], const Shared& shared, int keys) {
    const Thread thread;
    const int warp = thread.warp, row = thread.row, quarter = thread.quarter, key = 4 * quarter;
    const uint8* of_values = shared.v[key] + 16 * ((2 * warp + (row >> 2)) ^ swizzle_v(key)) + 4 * (row & 3);
    const uint16* of_scales = shared.v_scales[key] + warp;
    const uint8* of_weights = shared.weights[row] + 8 * quarter;
#pragma unroll 1
    for (; keys > 0; keys -= 16) {
        uint32 levels[4], scales[2], a[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) levels[i] = *(const uint32*)(of_values + i * DIM);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scales[i] = permuted(of_scales[2 * i * GROUPS], of_scales[(2 * i + 1) * GROUPS], 0x5410);
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {  // the first two dims of both keys, then the last two
                const uint32 biased = permuted(levels[2 * i], levels[2 * i + 1], tile ? 0x7362u : 0x5140u) ^ 0x80808080u;
                a[tile][2 * i] = decoded<FIRST>(biased, scales[i]);
                a[tile][2 * i + 1] = decoded<LAST>(biased, scales[i]);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const uint2 b = *(const uint2*)(of_weights + 8 * n * WEIGHT_BYTES);
            multiply(values[0][n], a[0], b.x, b.y);
            multiply(values[1][n], a[1], b.x, b.y);
        }
        of_values += 16 * DIM, of_scales += 16 * GROUPS, of_weights += 32;
    }
}

// --------------------------------------------------------------------------------------------------------------- softmax

// Over the eight rows of a product's result.
template <typename Op>
__device__ __forceinline__ float over_rows(float x, Op op) {
#pragma unroll
    for (int lanes = 16; lanes >= 4; lanes /= 2) x = op(x, __shfl_xor_sync(ALL, x, lanes));
    return x;
}

struct Larger {
    __device__ __forceinline__ float operator()(float x, float y) const { return fmaxf(x, y); }
};

struct Sum {
    __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
};

// Scores that are not seen become nothing; leaves the largest of the warp.
template <int TILES>
__device__ __forceinline__ void find_peaks(float (&scores)[TILES][4], Shared& shared, const Block& block) {
    const Thread thread;
    const int key = block.begin + 16 * thread.warp + 2 * thread.row;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int query = 8 * n + 2 * thread.quarter + i, seen = min(block.end, shared.seen[query]);
            if (key >= seen) scores[n][i] = nothing();
            if (key + 1 >= seen) scores[n][2 + i] = nothing();
            const float largest = over_rows(fmaxf(scores[n][i], scores[n][2 + i]), Larger());
            if (thread.row == 0) shared.of_warps[thread.warp][query] = largest;
        }
}

// Of all warps: what the largest scores are now.
__device__ __forceinline__ void meet(Shared& shared) {
    const int query = threadIdx.x;
    if (query >= QUERIES) return;
    const float before = shared.peaks[query];
    float peak = before;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) peak = fmaxf(peak, shared.of_warps[warp][query]);
    shared.peaks[query] = peak;
    shared.shrink[query] = exp2_of(before - (peak == nothing() ? 0.0f : peak));
}

// What a CTA has summed up of a piece, for the thread's keys or dims and its queries, of which there are two in each tile.
template <int TILES>
struct Sums {
    float weights[TILES][2];
    float values[2][TILES][4];

    // The weights of a block's scores; what was summed up before shrinks beside them.
    __device__ __forceinline__ void weigh(const float (&scores)[TILES][4], Shared& shared) {
        const Thread thread;
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int query = 8 * n + 2 * thread.quarter + i;
                const float peak = shared.peaks[query], shrink = shared.shrink[query], finite = peak == nothing() ? 0.0f : peak;
                const float one = exp2_of(scores[n][i] - finite), other = exp2_of(scores[n][2 + i] - finite);
                *(uint32*)(shared.weights[query] + 32 * thread.warp + 4 * thread.row) = halves(one, other);
                weights[n][i] = __fmaf_rn(weights[n][i], shrink, one + other);
#pragma unroll
                for (int dims = 0; dims < 2; dims++) {
                    values[dims][n][i] *= shrink;
                    values[dims][n][2 + i] *= shrink;
                }
            }
    }

    // Leaves the sums of weights of the warp's keys.
    __device__ __forceinline__ void end(Shared& shared) {
        const Thread thread;
        const int warp = thread.warp, row = thread.row, quarter = thread.quarter;
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float sum = over_rows(weights[n][i], Sum());
                if (row == 0) shared.of_warps[warp][8 * n + 2 * quarter + i] = sum;
            }
    }
};

// ---------------------------------------------------------------------------------------------------------------- results

// What a piece came to: its totals and peaks, and in ``shrink`` the powers of two that its sums are stored with, so that they
// are no larger than the values are. The next piece begins.
__device__ __forceinline__ void settle(const Arguments& given, Shared& shared, int piece, int count) {
    const int query = threadIdx.x;
    if (query >= QUERIES) return;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += shared.of_warps[warp][query];
    shared.shrink[query] = __uint_as_float((252 - (__float_as_uint(total) >> 23)) << 23);
    if (query < count) {
        given.totals[shared.places[query] + piece] = total;
        given.peaks[shared.places[query] + piece] = shared.peaks[query];
    }
    shared.peaks[query] = nothing();
}

template <int TILES>
__device__ __forceinline__ void write(
    const Arguments& given, const Shared& shared, const float (&values)[2][TILES][4], int piece, int count
) {
    const Thread thread;
    uint2* const parts = given.parts + (int64)piece * (DIM / 4) + 8 * thread.warp + thread.row;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int query = 8 * n + 2 * thread.quarter + i;
            const float shrink = shared.shrink[query];
            if (query < count)
                parts[shared.places[query] * (DIM / 4)] = {
                    halves(values[0][n][i] * shrink, values[0][n][2 + i] * shrink),
                    halves(values[1][n][i] * shrink, values[1][n][2 + i] * shrink)
                };
        }
}

// What a CTA has to do: queries ``first`` … of the packed rows, and where the keys are that they see.
struct Task {
    int64 first;
    const int* pages;
    int count, base, position, all;  // of queries; committed keys; the position of the first row; keys that some row sees
};

// Query i is of row i / GROUP.
__device__ __forceinline__ void note_queries(Shared& shared, const Arguments& given, const Task& task) {
    const int query = threadIdx.x;
    if (query >= QUERIES) return;
    const int64 row = task.first + query / GROUP, head = blockIdx.y * GROUP + query % GROUP;
    shared.places[query] = (row * given.kv_heads * GROUP + head) * given.pieces;
    shared.seen[query] = task.position + query / GROUP + 1;
    shared.peaks[query] = nothing();
}

// For up to 8 TILES queries.
template <int TILES>
__device__ __forceinline__ void run(Shared& shared, const Arguments& given, const Task& task, Block block) {
    const auto fetch_keys = [&](const Block& block, const int* pages) {
        fetch<swizzle_k>(shared.k, shared.k_scales, given.k, given.k_scales, block.keys(), pages, given.kv_heads);
    };
    const auto fetch_values = [&](const Block& block, const int* pages) {
        fetch<swizzle_v>(shared.v, shared.v_scales, given.v, given.v_scales, block.keys(), pages, given.kv_heads);
    };
    // Where keys are is asked for a block ahead: that is as far away as they are.
    const auto ask_for_pages = [&](const Block& block, int turn) {
        const int page = threadIdx.x;
        if (page * PAGE < block.keys()) copy_one(shared.pages[turn] + page, task.pages + block.begin / PAGE + page);
    };
    ask_for_pages(block, 0);
    end_of_copies();
    // Committed keys and values were there before the forward began, those of its own rows come from the kernel in front.
    const bool early = block.begin + KEYS <= task.base;
    if (!early) await_turn();
    Block following = next(block, task.all);
    note_queries(shared, given, task);
    await_copies<0>();
    __syncthreads();
    fetch_keys(block, shared.pages[0]);
    ask_for_pages(following, 1);
    end_of_copies();
    fetch_values(block, shared.pages[0]);
    end_of_copies();
    if (early) await_turn();
    take_queries<TILES>(shared, given, task.first, task.count);

    Sums<TILES> sums = {};
    for (int turn = 1;; turn ^= 1) {
        const bool more = following.begin < task.all;
        float scores[TILES][4] = {};
        await_copies<1>();
        __syncthreads();
        if (16 * (threadIdx.x / 32) < block.keys()) multiply_keys(scores, shared);
        find_peaks(scores, shared, block);
        __syncthreads();
        if (more) {
            fetch_keys(following, shared.pages[turn]);
            ask_for_pages(next(following, task.all), turn ^ 1);
        }
        end_of_copies();
        meet(shared);
        __syncthreads();
        sums.weigh(scores, shared);
        await_copies<1>();
        __syncthreads();
        multiply_values(sums.values, shared, block.keys());
        if (block.last()) sums.end(shared);
        __syncthreads();
        if (more) fetch_values(following, shared.pages[turn]);
        end_of_copies();
        if (block.last()) {
            settle(given, shared, block.piece, task.count);
            __syncthreads();
            write(given, shared, sums.values, block.piece, task.count);
            if (!more) return;
            sums = {};
        }
        block = following;
        following = next(following, task.all);
    }
}

// There are two CTAs for the rows of a tile. Where not many are busy, so that each is waited for, each has half of them; else one has
// all, and keys are decoded once. (A query's bits are the same.)
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend(const __grid_constant__ Arguments given) {
    extern __shared__ __align__(128) uint8 memory[];
    Shared& shared = *(Shared*)memory;
    asm volatile("griddepcontrol.launch_dependents;");
    const int tiles = 2 * given.tiles_per_span, span = blockIdx.x / tiles, tile = blockIdx.x % tiles / 2, half = blockIdx.x % 2;
    const int base = (int)given.bases[span], length = (int)given.lengths[span];
    const bool few = (piece_of(base + length) + 1) * (int)(gridDim.x / 2 * gridDim.y) <= given.few;
    const int row = tile * ROWS + half * (few ? ROWS / 2 : ROWS), rows = half && !few ? 0 : min(length - row, few ? ROWS / 2 : ROWS);
    const int* pages = given.table + given.lanes[span] * given.table_stride;
    const Task task = {given.starts[span] + row, pages, rows * GROUP, base, base + row, base + row + rows};
    const Block block = first_block(blockIdx.z, task.all);
    if (rows <= 0 || block.begin >= task.all) {
        // one of those with nothing to do waits: the next kernel takes it that what is before this one has ended too
        if (blockIdx.x + blockIdx.y + blockIdx.z == 0) await_turn();
    } else if (task.count <= 8)
        run<1>(shared, given, task, block);
    else if (task.count <= 8 * HALF)
        run<HALF>(shared, given, task, block);
    else
        run<2 * HALF>(shared, given, task, block);
}
