// The decode product on Hopper GPUs (sm_90a): out[m, n] = sum over k of x[m, k] * weight[n, k], for up to TOKENS rows of x.
//
// hopper.py compiles this file for one FORM of weight (a struct below) and one number of TOKENS, a multiple of 8 up to 64, with
// STAGES buffers, and puts before it the function multiply(), one wgmma instruction of that width. No header is included.
//
// Weights are the A operand of wgmma, decoded into registers; x is the B operand, in shared memory. tiles.py describes a weight's
// units, (tile of 128 rows, block of 256 columns). Two tiles below each other are a pair; the (pair, block) steps of a weight,
// pair by pair, are cut into gridDim.x equal parts, one for each CTA. A warp fetches units and blocks of x, sixteen warps decode
// and multiply, each of them 16 rows of the pair. A CTA stores what belongs to a whole pair as the result and anything else as a
// partial sum, and add_parts() adds the partial sums of a pair in the order of the parts.

typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;

struct alignas(64) TensorMap {
    char opaque[128];
};

constexpr int CONSUMERS = 16;  // warps
constexpr int PAIR_ROWS = 256;
constexpr int X_BYTES = TOKENS * 512;  // a block of x: four swizzled tiles of TOKENS rows by 64 columns
constexpr uint32 HALF_1024 = 0x64646464;  // the upper bytes of float16 1024...1279, whose last place is one

// What a byte permutation reads as its tables. Loaded, and by an index that depends on the lane, so that they are registers:
// given as constants they would be copied at every use.
extern "C" __device__ uint32 lane_constants[6][4] = LANE_CONSTANTS;

// ------------------------------------------------------------------------------------------------------------------ PTX

__device__ __forceinline__ uint32 permute(uint32 a, uint32 b, uint32 selector) {
    uint32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
    return out;
}

__device__ __forceinline__ uint32 add2(uint32 a, uint32 b) {
    uint32 out;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ uint32 mul2(uint32 a, uint32 b) {
    uint32 out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ uint32 fma2(uint32 a, uint32 b, uint32 c) {
    uint32 out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// Both halves of a pair of float16 set to one of them: an operand's modifier, no instruction.
__device__ __forceinline__ uint32 broadcast(uint32 pair, int upper) {
    uint32 out;
    if (upper)
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(out) : "r"(pair));
    else
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(out) : "r"(pair));
    return out;
}

__device__ __forceinline__ float to_float(uint32 pair, int upper) {
    float out;
    if (upper)
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(out) : "r"(pair));
    else
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(out) : "r"(pair));
    return out;
}

__device__ __forceinline__ float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ uint4 shared_uint4(uint32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

__device__ __forceinline__ uint2 shared_uint2(uint32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}

__device__ __forceinline__ uint32 shared_uint32(uint32 at) {
    uint32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

// What another kernel may have written after this one was started must not come from the L1 cache.
__device__ __forceinline__ float global_float(const float* at) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ float4 global_float4(const float* at) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(uint32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32 barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again%=;\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void fetch(uint32 to, const uint8* from, int bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void fetch_x(uint32 to, const TensorMap* x, int row, int block, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(x), "r"(0), "r"(row), "r"(4 * block), "r"(barrier)
        : "memory");
}

// ---------------------------------------------------------------------------------------------------------------- forms
//
// A form reads its numbers of one half of a unit (128 columns) and decodes 32 columns at a time, s = 0...3, into the A
// fragments of two steps of 16 columns: a[4 i + 2 j + r] has column pair j of step i, for row g of the warp (r = 0) or row
// g + 8. The values are those of kernel.py, bit for bit. HAS_FACTOR: without the factor d of a block.

__device__ __forceinline__ uint32 at(const uint4& v, int s) { return s == 0 ? v.x : s == 1 ? v.y : s == 2 ? v.z : v.w; }

struct Place {
    uint32 unit;  // in shared memory
    int w, g, lane;

    // ``words`` int32 for each lane in an array [h, r, w, g, t, words]
    __device__ __forceinline__ uint32 of_lane(int h, int r, int words) const {
        return unit + (((h * 2 + r) * 8 + w) * 32 + lane) * 4 * words;
    }
    // ``bytes`` for each row pair and half in an array [w, g, h, bytes]
    __device__ __forceinline__ uint32 of_rows(int h, int bytes) const { return unit + ((w * 8 + g) * 2 + h) * bytes; }
};

constexpr int CODES = 16384;  // bytes of ``codes`` in a unit

struct IQ4_XS {
    static constexpr int BYTES = CODES + 1024 + 256;
    static constexpr bool HAS_FACTOR = true;
    struct Half {
        uint4 codes[2];
        uint2 scales;
    };
    Place p;
    uint32 minus_one, negative[2], positive[2], half_1024;

    __device__ IQ4_XS(int lane) {
        const int t = lane & 3;
        minus_one = lane_constants[0][t];
        negative[0] = lane_constants[1][t], negative[1] = lane_constants[2][t];
        positive[0] = lane_constants[3][t], positive[1] = lane_constants[4][t];
        half_1024 = lane_constants[5][t];
    }
    __device__ __forceinline__ uint32 factor() const { return shared_uint32(p.unit + CODES + 1024 + (p.w * 8 + p.g) * 4); }
    __device__ __forceinline__ Half load(int h) const {
        return {{shared_uint4(p.of_lane(h, 0, 4)), shared_uint4(p.of_lane(h, 1, 4))}, shared_uint2(p.of_rows(h, 8) + CODES)};
    }
    // A permutation looks up the magnitudes of the negative values, another the positive values with the index inverted: an
    // index with its top bit set asks for the sign of a table's byte, which is zero. Value + 128 is the last byte of 1152 +
    // value, and (1152 + value) * scale - 1152 * scale is exact before its one rounding.
    __device__ __forceinline__ void decode(const Half& half, int s, uint32* a) const {
        const uint32 both = s & 1 ? 0x4342 : 0x4140;
        const uint32 scales = add2(permute(s < 2 ? half.scales.x : half.scales.y, half_1024, both), 0xE420E420);  // -1056
        const uint32 shifts = mul2(scales, 0xE480E480);                                                            // -1152
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32 scale = broadcast(scales, r), shift = broadcast(shifts, r);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32 index = at(half.codes[r], s) >> (16 * i);
                const uint32 inverse = index * minus_one + minus_one;  // ~index, but on the multiplier, which is free
                const uint32 values = permute(positive[0], positive[1], inverse) + 0x80808080u -
                                      permute(negative[0], negative[1], index);
                a[4 * i + r] = fma2(permute(values, half_1024, 0x4140), scale, shift);
                a[4 * i + 2 + r] = fma2(permute(values, half_1024, 0x4342), scale, shift);
            }
        }
    }
};

struct Q6_K {
    static constexpr int BYTES = CODES + 8192 + 2048 + 256;
    static constexpr bool HAS_FACTOR = true;
    struct Half {
        uint4 codes[2];
        uint2 high[2];
        uint4 scales;
    };
    Place p;
    uint32 half_1024;

    __device__ Q6_K(int lane) { half_1024 = lane_constants[5][lane & 3]; }
    __device__ __forceinline__ uint32 factor() const { return shared_uint32(p.unit + BYTES - 256 + (p.w * 8 + p.g) * 4); }
    __device__ __forceinline__ Half load(int h) const {
        return {{shared_uint4(p.of_lane(h, 0, 4)), shared_uint4(p.of_lane(h, 1, 4))},
                {shared_uint2(p.of_lane(h, 0, 2) + CODES), shared_uint2(p.of_lane(h, 1, 2) + CODES)},
                shared_uint4(p.of_rows(h, 16) + CODES + 8192)};
    }
    // As float16 64 + code, whose last place is 1/16; 96 * scale is exact.
    __device__ __forceinline__ void decode(const Half& half, int s, uint32* a) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32 scales = add2(permute(at(half.scales, s), half_1024, i ? 0x4341 : 0x4240), 0xE480E480);  // -1152
            const uint32 shifts = mul2(scales, 0xD600D600);                                                      // -96
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32 word = at(half.codes[r], s), high = s < 2 ? half.high[r].x : half.high[r].y;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int left = 4 - 8 * i - 4 * j, high_left = 8 - 8 * (s & 1) - 4 * i - 2 * j;
                    const uint32 low_bits = left >= 0 ? word << (left & 31) : word >> (-left & 31);
                    const uint32 high_bits = high_left >= 0 ? high << (high_left & 31) : high >> (-high_left & 31);
                    const uint32 value = (low_bits & 0x00F000F0) | 0x54005400 | (high_bits & 0x03000300);
                    a[4 * i + 2 * j + r] = fma2(value, broadcast(scales, r), broadcast(shifts, r));
                }
            }
        }
    }
};

struct Q8_0 {
    static constexpr int BYTES = 2 * CODES + 2048;
    static constexpr bool HAS_FACTOR = false;
    struct Half {
        uint4 codes[2][2];  // of step i, for row r
        uint4 scales;
    };
    Place p;
    uint32 half_1024;

    __device__ Q8_0(int lane) { half_1024 = lane_constants[5][lane & 3]; }
    __device__ __forceinline__ uint32 factor() const { return 0; }
    __device__ __forceinline__ Half load(int h) const {
        const uint32 first = p.of_lane(h, 0, 4), second = p.of_lane(h, 1, 4);
        return {{{shared_uint4(first), shared_uint4(second)}, {shared_uint4(first + CODES), shared_uint4(second + CODES)}},
                shared_uint4(p.of_rows(h, 16) + 2 * CODES)};
    }
    __device__ __forceinline__ void decode(const Half& half, int s, uint32* a) const {
        const uint32 scales = at(half.scales, s);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32 word = at(half.codes[i][r], s);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const uint32 code = add2(permute(word, half_1024, j ? 0x4341 : 0x4240), 0xE480E480);  // -1152
                    a[4 * i + 2 * j + r] = mul2(code, broadcast(scales, r));
                }
            }
    }
};

// Q4_K and Q5_K: the scale and the shift of 32 columns, each a product of two float16 as in kernel.py.
struct ScalesAndShifts {
    uint32 of_row[2];

    __device__ __forceinline__ ScalesAndShifts(uint32 bytes, const uint32 (&d)[2], uint32 half_1024) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            of_row[r] = mul2(add2(permute(bytes, half_1024, r ? 0x4342 : 0x4140), 0xE400E400), d[r] ^ 0x80000000);  // -1024
    }
    __device__ __forceinline__ uint32 apply(uint32 value, int r) const {
        return fma2(add2(value, 0xE400E400), broadcast(of_row[r], 0), broadcast(of_row[r], 1));
    }
};

struct Q4_K {
    static constexpr int BYTES = CODES + 2048 + 512;
    static constexpr bool HAS_FACTOR = false;
    struct Half {
        uint4 codes[2];
        uint4 scales;
        uint32 d[2];
    };
    Place p;
    uint32 half_1024;

    __device__ Q4_K(int lane) { half_1024 = lane_constants[5][lane & 3]; }
    __device__ __forceinline__ uint32 factor() const { return 0; }
    __device__ __forceinline__ Half load(int h) const {
        const uint2 d = shared_uint2(p.unit + CODES + 2048 + (p.w * 8 + p.g) * 8);
        return {{shared_uint4(p.of_lane(h, 0, 4)), shared_uint4(p.of_lane(h, 1, 4))},
                shared_uint4(p.of_rows(h, 16) + CODES),
                {d.x, d.y}};
    }
    __device__ __forceinline__ void decode(const Half& half, int s, uint32* a) const {
        const ScalesAndShifts scales(at(half.scales, s), half.d, half_1024);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int pair = 0; pair < 4; pair++)
                a[2 * pair + r] = scales.apply(((at(half.codes[r], s) >> (4 * pair)) & 0x000F000F) | 0x64006400, r);
    }
};

struct Q5_K {
    static constexpr int BYTES = CODES + 4096 + 2048 + 512;
    static constexpr bool HAS_FACTOR = false;
    struct Half {
        uint4 codes[2];
        uint32 high[2];
        uint4 scales;
        uint32 d[2];
    };
    Place p;
    uint32 half_1024;

    __device__ Q5_K(int lane) { half_1024 = lane_constants[5][lane & 3]; }
    __device__ __forceinline__ uint32 factor() const { return 0; }
    __device__ __forceinline__ Half load(int h) const {
        const uint2 d = shared_uint2(p.unit + BYTES - 512 + (p.w * 8 + p.g) * 8);
        return {{shared_uint4(p.of_lane(h, 0, 4)), shared_uint4(p.of_lane(h, 1, 4))},
                {shared_uint32(p.of_lane(h, 0, 1) + CODES), shared_uint32(p.of_lane(h, 1, 1) + CODES)},
                shared_uint4(p.of_rows(h, 16) + CODES + 4096),
                {d.x, d.y}};
    }
    __device__ __forceinline__ void decode(const Half& half, int s, uint32* a) const {
        const ScalesAndShifts scales(at(half.scales, s), half.d, half_1024);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                const int left = 4 - 4 * s - pair;
                const uint32 high = left >= 0 ? half.high[r] << (left & 31) : half.high[r] >> (-left & 31);
                const uint32 low = ((at(half.codes[r], s) >> (4 * pair)) & 0x000F000F) | 0x64006400;
                a[2 * pair + r] = scales.apply(low | (high & 0x00100010), r);
            }
    }
};

// -------------------------------------------------------------------------------------------------------------- product

constexpr int STAGE_BYTES = 2 * FORM::BYTES;

struct Shared {
    uint32 x, weights, full, empty;

    __device__ __forceinline__ Shared(uint32 base) {
        x = (base + 1023) & ~1023u;  // the swizzle repeats every 1024 bytes
        weights = x + STAGES * X_BYTES;
        full = weights + STAGES * STAGE_BYTES;
        empty = full + 8 * STAGES;
    }
};

struct Step {
    int pair, block;

    __device__ __forceinline__ void next(int blocks) {
        if (++block == blocks) block = 0, pair++;
    }
};

__device__ __forceinline__ void fetch_units(
    const Shared& shared, int stage, const uint8* weights, const Step& step, int tiles, int blocks) {
    const uint32 to = shared.weights + stage * STAGE_BYTES, barrier = shared.full + 8 * stage;
    const uint8* unit = weights + ((uint64)(2 * step.pair) * blocks + step.block) * FORM::BYTES;
    const bool both = 2 * step.pair + 1 < tiles;
    barrier_expect(barrier, X_BYTES + (both ? 2 : 1) * FORM::BYTES);
    fetch(to, unit, FORM::BYTES, barrier);
    if (both) fetch(to + FORM::BYTES, unit + (uint64)blocks * FORM::BYTES, FORM::BYTES, barrier);
}

__device__ __forceinline__ void multiply_64(float (&sums)[TOKENS / 2], const uint32 (&a)[16], uint64 b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 4; step++) multiply(sums, a + 4 * step, b + 2 * step);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void multiplied() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// x is a tensor [columns / 64, rows, 64] of float16; part p of gridDim.x parts has the steps from p * steps / gridDim.x on.
// ``factors`` and ``out`` begin at ``first_row``. ``partial`` is [part + pair, rows, 256].
extern "C" __global__ void __launch_bounds__(32 * (CONSUMERS + 1), 1)
    product(const __grid_constant__ TensorMap x, const uint8* __restrict__ weights, const float* factors, float* out,
            float* partial, int first_row, int rows, int outputs, int out_stride, int tiles, int blocks) {
    extern __shared__ uint8 memory[];
    const Shared shared((uint32)__cvta_generic_to_shared(memory));
    // Through a shuffle, so that the compiler sees that it is the same for the whole warp, which wgmma needs.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int steps = (tiles + 1) / 2 * blocks;
    const int first = (int)((uint64)blockIdx.x * steps / gridDim.x);
    const int end = (int)((uint64)(blockIdx.x + 1) * steps / gridDim.x);
    const int early = min(STAGES, end - first);
    Step step = {first / blocks, first % blocks};
    asm volatile("griddepcontrol.launch_dependents;");

    if (threadIdx.x == 32 * CONSUMERS) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full + 8 * stage, 1);
            barrier_init(shared.empty + 8 * stage, CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
        asm volatile("fence.proxy.async.shared::cta;");
        // Weights do not depend on the kernel before this one; x, out and partial do.
        Step ahead = step;
        for (int stage = 0; stage < early; stage++, ahead.next(blocks))
            fetch_units(shared, stage, weights, ahead, tiles, blocks);
    }
    __syncthreads();

    if (warp == CONSUMERS) {
        if (lane == 0) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int stage = 0; stage < early; stage++, step.next(blocks))
                fetch_x(shared.x + stage * X_BYTES, &x, first_row, step.block, shared.full + 8 * stage);
            int stage = 0, parity = 0;
            for (int done = first + early; done < end; done++, step.next(blocks)) {
                barrier_wait(shared.empty + 8 * stage, parity);
                fetch_units(shared, stage, weights, step, tiles, blocks);
                fetch_x(shared.x + stage * X_BYTES, &x, first_row, step.block, shared.full + 8 * stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    FORM form(lane);
    float sums[TOKENS / 2];  // sums[4 i + 2 r + e]: row g + 8 r of the warp, token 8 i + 2 t + e
    uint32 even[16], odd[16];
    const int g = lane >> 2, t = lane & 3;
    int stage = 0, parity = 0;
    for (int done = first; done < end; step.pair++, step.block = 0) {
        const int count = min(blocks - step.block, end - done);
        done += count;
        float d[2] = {1.0f, 1.0f};
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0.0f;
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            barrier_wait(shared.full + 8 * stage, parity);
            form.p = {shared.weights + stage * STAGE_BYTES + (warp >> 3) * FORM::BYTES, warp & 7, g, lane};
            typename FORM::Half half = form.load(0);
            const uint32 factors_of_rows = form.factor();
            form.decode(half, 0, even);
            form.decode(half, 1, even + 8);
            if (FORM::HAS_FACTOR) {  // the sums become those in units of this block's d
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float now = to_float(factors_of_rows, r), change = d[r] * reciprocal(now);
                    d[r] = now;
#pragma unroll
                    for (int token = 0; token < TOKENS / 8; token++) {
                        sums[4 * token + 2 * r] *= change;
                        sums[4 * token + 2 * r + 1] *= change;
                    }
                }
            }
            // Descriptor of x: swizzle of 128 bytes, groups of 8 rows 1024 bytes apart.
            const uint64 b = (1ull << 62) | (64ull << 32) | (1ull << 16) | (((shared.x + stage * X_BYTES) >> 4) & 0x3FFF);
            multiply_64(sums, even, b);
            form.decode(half, 2, odd);
            form.decode(half, 3, odd + 8);
            half = form.load(1);
            multiply_64(sums, odd, b + TOKENS * 8);
            multiplied<1>();
            form.decode(half, 0, even);
            form.decode(half, 1, even + 8);
            multiply_64(sums, even, b + 2 * TOKENS * 8);
            multiplied<1>();
            form.decode(half, 2, odd);
            form.decode(half, 3, odd + 8);
            multiply_64(sums, odd, b + 3 * TOKENS * 8);
            multiplied<0>();
            if (lane == 0) barrier_arrive(shared.empty + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        const bool whole = count == blocks;
        const int row = warp * 16 + g, n = step.pair * PAIR_ROWS + row;
        float* piece = partial + (uint64)(blockIdx.x + step.pair) * rows * PAIR_ROWS + row;
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const int m = i / 4 * 8 + 2 * t + i % 2, r = i / 2 % 2;
            if (m >= rows) continue;
            const float sum = sums[i] * d[r];
            if (!whole)
                piece[(uint64)m * PAIR_ROWS + 8 * r] = sum;
            else if (n + 8 * r < outputs)
                out[(uint64)m * out_stride + n + 8 * r] = sum * global_float(factors + m);
        }
    }
}

// Block: 64 threads of four rows of the pair blockIdx.x by four tokens. ``parts`` is the gridDim.x of product().
extern "C" __global__ void __launch_bounds__(256) add_parts(
    const float* partial, const float* factors, float* out, int rows, int outputs, int out_stride, int blocks, int parts) {
    const int pair = blockIdx.x, m = blockIdx.y * blockDim.y + threadIdx.y;
    const uint64 steps = (uint64)gridDim.x * blocks;
    // The part that has step s is the last one that starts at s or before it.
    const int first = (int)((((uint64)pair * blocks + 1) * parts - 1) / steps);
    const int last = (int)((((uint64)pair * blocks + blocks) * parts - 1) / steps);
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (m >= rows || first == last) return;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int part = first; part <= last; part++) {
        const float4 v = global_float4(partial + ((uint64)(part + pair) * rows + m) * PAIR_ROWS + 4 * threadIdx.x);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const float factor = global_float(factors + m);
    const float values[4] = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
    const int n = pair * PAIR_ROWS + 4 * threadIdx.x;
    float* to = out + (uint64)m * out_stride + n;
    if (n + 3 < outputs && ((uint64)to & 15) == 0) {
        *(float4*)to = {values[0], values[1], values[2], values[3]};
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (n + i < outputs) to[i] = values[i];
    }
}
