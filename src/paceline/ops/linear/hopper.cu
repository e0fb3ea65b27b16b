// The decode product on Hopper GPUs (sm_90a): out[m, n] = sum over k of x[m, k] * weight[n, k], for up to TOKENS rows of x.
//
// hopper.py compiles this file for one FORM of weight (a struct below) and one number of TOKENS, a multiple of 8 up to 64, with
// STAGES buffers, and puts constants before it and the function multiply(), one wgmma instruction of that width. No header is
// included.
//
// Weights are the A operand of wgmma, decoded into registers; x is the B operand, in shared memory. tiles.py describes a
// weight's units, (tile of 128 rows, block of 256 columns). Two tiles below each other are a pair, and a (pair, block) is a step
// of a CTA. One thread fetches units and blocks of x, sixteen warps decode and multiply, each of them 16 rows of the pair.
//
// With SWIGLU the weight is two of as many tiles, gate and up, and a pair is a tile of either: its results are finished to
// silu(gate) up where they are, and leave as rows of another product's x. What scales such a row to float16 has to be known before
// any of it is: |gate| and |up| are at most the norm of the row of x times that of the weight's longest row.
//
// With HALVES a pair is a tile twice, with the first half of its blocks and with the second, ``blocks`` each: a CTA has it alone,
// and the warps of both halves add up what two CTAs would have to exchange. ``tiles`` counts each tile twice.
//
// Each CTA has ``whole`` pairs alone, as many as there are for every CTA, possibly none. The pairs before those are the rest:
// their steps, pair by pair, are cut into ``sharers`` equal parts, one for each of the first CTAs, which begins with it.
//
// A pair that lies in several parts is summed in the end: each of them leaves its sums in ``pieces``, which are added up in the
// order of the parts. Where there are whole pairs, warps that have nothing else to do add up the rest meanwhile. Where there
// are none, the parts whose last pair it is share it out by groups of eight tokens. They wait for each other, so all CTAs of a
// product have to be there together.

typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;

struct alignas(64) TensorMap {
    char opaque[128];
};

constexpr int CONSUMERS = 16;  // warps
// Registers are moved between groups of four warps, so there are four that do not multiply: one fetches, three add up the rest.
// 640 threads begin with 96 registers each, and 128 with 32 and 512 with 112 are as many.
constexpr int THREADS = 32 * CONSUMERS + 128;
constexpr int ADDERS = 3;
constexpr int PAIR_ROWS = 256;
constexpr int BLOCK_BYTES = TOKENS * 512;  // a block of x: four swizzled tiles of TOKENS rows by 64 columns
constexpr int X_BYTES = HALVES ? 2 * BLOCK_BYTES : BLOCK_BYTES;
constexpr uint32 HALF_1024 = 0x64646464;   // the upper bytes of float16 1024...1279, whose last place is one
constexpr uint32 MINUS_1024 = 0xE400E400;  // pairs of float16
constexpr uint32 MINUS_1152 = 0xE480E480;

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

// What was written elsewhere while this kernel was here already must not come from the L1 cache. (No clobber of memory, which
// would put one load after the other; volatile assembly stays in order.)
__device__ __forceinline__ float global_float(const float* at) {
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ uint4 global_uint4(const uint4* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ void store_uint4(uint4* at, const uint4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
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

// Weights are read once and should leave the L2 cache to everything else.
__device__ __forceinline__ void fetch(uint32 to, const uint8* from, int bytes, uint32 barrier) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n}" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void fetch_block(uint32 to, const TensorMap* x, int row, int block, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(x), "r"(0), "r"(row), "r"(4 * block), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void fetch_x(uint32 to, const TensorMap* x, int row, int block, int blocks, uint32 barrier) {
    fetch_block(to, x, row, block, barrier);
    if (HALVES) fetch_block(to + BLOCK_BYTES, x, row, blocks + block, barrier);
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

// Constants are disguised: most instructions take one from the code but not two, and others would be copied to registers at
// every use.
struct Opaque {
    uint32 zero;  // unknown to the compiler, and another for each lane
    __device__ __forceinline__ uint32 operator()(uint32 constant) const { return constant ^ zero; }
};

struct IQ4_XS {
    static constexpr int BYTES = CODES + 1024 + 256;
    static constexpr bool HAS_FACTOR = true;
    struct Half {
        uint4 codes[2];
        uint2 scales;
    };
    Place p;
    uint32 half_1024, table;

    __device__ __forceinline__ IQ4_XS(int warp, int lane, Opaque opaque) {
        half_1024 = opaque(HALF_1024), table = opaque(TABLE | lane << 2);
        fill_table(warp);
    }
    __device__ __forceinline__ uint32 factor() const { return shared_uint32(p.unit + CODES + 1024 + (p.w * 8 + p.g) * 4); }
    __device__ __forceinline__ Half load(int h) const {
        return {{shared_uint4(p.of_lane(h, 0, 4)), shared_uint4(p.of_lane(h, 1, 4))}, shared_uint2(p.of_rows(h, 8) + CODES)};
    }
    // A byte of codes is the second byte of the address of its two values. Each lane has a table in a bank of its own.
    __device__ __forceinline__ void decode(const Half& half, int s, uint32* a) const {
        const uint32 both = s & 1 ? 0x4342 : 0x4140;
        const uint32 scales = add2(permute(s < 2 ? half.scales.x : half.scales.y, half_1024, both), 0xE420E420);  // -1056
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                const uint32 values = shared_uint32(permute(at(half.codes[r], s), table, 0x7604 | pair << 4));
                a[2 * pair + r] = mul2(values, broadcast(scales, r));
            }
    }
    // A warp fills in the bytes whose lower code is its number.
    __device__ __forceinline__ void fill_table(int warp) const {
        const uint32 own = value(warp);
#pragma unroll
        for (int code = 0; code < 16; code++) {
            const uint32 values = permute(own, value(code), 0x5410);
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(table | code << 12 | warp << 8), "r"(values) : "memory");
        }
    }
    // A value of the codebook as two float16. A byte permutation looks up the magnitudes of the negative values, another the
    // positive values with the index inverted: an index with its top bit set asks for the sign of a table's byte, which is
    // zero. Value + 128 is the last byte of 1152 + value.
    static __device__ __forceinline__ uint32 value(uint32 code) {
        const uint32 shifted = permute(POSITIVE_0, POSITIVE_1, ~code) + 0x80 - permute(NEGATIVE_0, NEGATIVE_1, code);
        return add2(permute(shifted, HALF_1024, 0x4040), MINUS_1152);
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
    uint32 half_1024, sixty_four;

    __device__ __forceinline__ Q6_K(int, int, Opaque opaque) {
        half_1024 = opaque(HALF_1024), sixty_four = opaque(0x54005400);
    }
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
            const uint32 scales = add2(permute(at(half.scales, s), half_1024, i ? 0x4341 : 0x4240), MINUS_1152);
            const uint32 shifts = mul2(scales, 0xD600D600);  // -96
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32 word = at(half.codes[r], s), high = s < 2 ? half.high[r].x : half.high[r].y;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int left = 4 - 8 * i - 4 * j, high_left = 8 - 8 * (s & 1) - 4 * i - 2 * j;
                    const uint32 low_bits = left >= 0 ? word << (left & 31) : word >> (-left & 31);
                    const uint32 high_bits = high_left >= 0 ? high << (high_left & 31) : high >> (-high_left & 31);
                    const uint32 value = (low_bits & 0x00F000F0) | sixty_four | (high_bits & 0x03000300);
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

    __device__ __forceinline__ Q8_0(int, int, Opaque opaque) { half_1024 = opaque(HALF_1024); }
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
                    const uint32 code = add2(permute(word, half_1024, j ? 0x4341 : 0x4240), MINUS_1152);
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
            of_row[r] = mul2(add2(permute(bytes, half_1024, r ? 0x4342 : 0x4140), MINUS_1024), d[r] ^ 0x80000000);
    }
    __device__ __forceinline__ uint32 apply(uint32 value, int r) const {
        return fma2(add2(value, MINUS_1024), broadcast(of_row[r], 0), broadcast(of_row[r], 1));
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
    uint32 half_1024, codes_1024;

    __device__ __forceinline__ Q4_K(int, int, Opaque opaque) {
        half_1024 = opaque(HALF_1024), codes_1024 = opaque(0x64006400);
    }
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
                a[2 * pair + r] = scales.apply(((at(half.codes[r], s) >> (4 * pair)) & 0x000F000F) | codes_1024, r);
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
    uint32 half_1024, codes_1024;

    __device__ __forceinline__ Q5_K(int, int, Opaque opaque) {
        half_1024 = opaque(HALF_1024), codes_1024 = opaque(0x64006400);
    }
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
                const uint32 low = ((at(half.codes[r], s) >> (4 * pair)) & 0x000F000F) | codes_1024;
                a[2 * pair + r] = scales.apply(low | (high & 0x00100010), r);
            }
    }
};

// -------------------------------------------------------------------------------------------------------------- product

constexpr int PIECE = TOKENS / 8 * 32 * CONSUMERS;  // uint4 in a piece

// Addresses in shared memory, which hopper.py has laid out; the last buffer of weights may lie apart from the others.
__device__ __forceinline__ uint32 x_of(int stage) { return X_AT + stage * X_BYTES; }
__device__ __forceinline__ uint32 weights_of(int stage) {
    return stage == STAGES - 1 ? LAST_WEIGHTS_AT : WEIGHTS_AT + stage * 2 * FORM::BYTES;
}
constexpr uint32 FACTORS_AT = BARRIERS_AT + 128, SCALES_AT = BARRIERS_AT + 384;
__device__ __forceinline__ uint32 full(int stage) { return BARRIERS_AT + 16 * stage; }
__device__ __forceinline__ uint32 empty(int stage) { return BARRIERS_AT + 16 * stage + 8; }

struct Step {
    int pair, block;
};

// The steps of this CTA: first ``shared`` ones of the rest, then those of its whole pairs. The rest has fewer pairs than there are
// CTAs, so numbers of 32 bits do for its cut.
struct Cut {
    int rest, sharers, whole, blocks;  // ``rest`` and ``whole`` count pairs
    int first, shared, count;

    __device__ __forceinline__ Cut(int tiles, int blocks, int whole, int sharers)
        : rest((tiles + 1) / 2 - whole * (int)gridDim.x), sharers(sharers), whole(whole), blocks(blocks) {
        first = begin_of(blockIdx.x), shared = begin_of(blockIdx.x + 1) - first, count = shared + whole * blocks;
    }
    // The first step of a part; CTAs without one are at the end.
    __device__ __forceinline__ int begin_of(uint32 part) const {
        return min(part, (uint32)sharers) * (rest * blocks) / max((uint32)sharers, 1u);
    }
    __device__ __forceinline__ Step at(int i) const {
        const uint32 begin = i < shared ? first : (rest + blockIdx.x * whole) * blocks - shared;
        return {(int)((begin + i) / blocks), (int)((begin + i) % blocks)};
    }
};

__device__ __forceinline__ void fetch_units(int stage, const uint8* weights, const Step& step, int tiles, int blocks) {
    const int tile = SWIGLU ? step.pair : 2 * step.pair, apart = SWIGLU ? tiles / 2 : 1;  // of HALVES both are halves
    const uint8* unit = weights + ((uint64)tile * blocks + step.block) * FORM::BYTES;
    const bool both = tile + apart < tiles;
    barrier_expect(full(stage), X_BYTES + (both ? 2 : 1) * FORM::BYTES);
    fetch(weights_of(stage), unit, FORM::BYTES, full(stage));
    if (both) fetch(weights_of(stage) + FORM::BYTES, unit + (uint64)apart * blocks * FORM::BYTES, FORM::BYTES, full(stage));
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

// The same number; what follows from it is not computed ahead and kept in registers while the tensor cores need them.
__device__ __forceinline__ uint32 afresh(uint32 number) {
    asm volatile("" : "+r"(number));
    return number;
}

// The parts that have some of a pair. A part has at most two pieces: of the pair that it begins in and of the one that it ends
// in.
struct Share {
    int first, last;
    int enders;  // parts, from the first on, whose last pair it is

    __device__ __forceinline__ Share(int pair, const Cut& cut) {
        const uint32 blocks = afresh(cut.blocks), from = pair * blocks, to = from + blocks, steps = cut.rest * blocks;
        if (pair >= cut.rest) {
            first = last = blockIdx.x, enders = 1;
            return;
        }
        // The part that has step s is the last one that begins at s or before it.
        first = ((from + 1) * cut.sharers - 1) / steps, last = (to * cut.sharers - 1) / steps;
        enders = max(last - first + (cut.begin_of(last + 1) == to), 1);
    }
    __device__ __forceinline__ bool alone() const { return first == last; }
    __device__ __forceinline__ int piece_of(int part) const { return 2 * part + (part < first + enders); }
};

// Which groups of eight tokens a CTA finishes after its steps of a pair: each ``every``-th one from ``begin`` on. It does not wait
// for the other parts when it has whole pairs to do.
struct Groups {
    int begin, every;

    __device__ __forceinline__ Groups(const Share& share, bool ends_here, int whole, int groups) {
        every = share.enders;
        begin = share.alone() || (ends_here && !whole) ? blockIdx.x - share.first : groups;
    }
};

// Whoever reads a piece waits until it holds no EMPTY, a NaN that arithmetic does not make, and makes it EMPTY again.

__device__ __forceinline__ uint4 of_group(const float (&sums)[TOKENS / 2], int group) {
    uint4 v = {};
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++)
        if (i == group)
            v = {__float_as_uint(sums[4 * i]), __float_as_uint(sums[4 * i + 1]), __float_as_uint(sums[4 * i + 2]),
                 __float_as_uint(sums[4 * i + 3])};
    return v;
}

// Leaves the groups that this part does not finish.
__device__ __forceinline__ void leave(const float (&sums)[TOKENS / 2], uint4* piece, const Groups& finishes, int groups) {
    int own = finishes.begin;
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
        if (i == own)
            own += finishes.every;
        else if (i < groups)
            store_uint4(piece + i * 32 * CONSUMERS, of_group(sums, i));
    }
}

// The sum over parts of one group, of which ``own`` is that of ``part``, if it has one; ``piece`` is that of piece 0. BATCH pieces
// are read at once.
template <int BATCH>
__device__ __forceinline__ float4 of_all_parts(const uint4& own, uint4* piece, const Share& share, int part) {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int other = share.first; other <= share.last; other += BATCH) {
        uint4 v[BATCH];
        bool complete;
        do {
            complete = true;
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                v[j] = own;
                if (other + j <= share.last && other + j != part) v[j] = global_uint4(piece + share.piece_of(other + j) * PIECE);
            }
#pragma unroll
            for (int j = 0; j < BATCH; j++)
                complete &= v[j].x != EMPTY && v[j].y != EMPTY && v[j].z != EMPTY && v[j].w != EMPTY;
        } while (!complete);
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            if (other + j > share.last) continue;
            if (other + j != part) store_uint4(piece + share.piece_of(other + j) * PIECE, {EMPTY, EMPTY, EMPTY, EMPTY});
            sum.x += __uint_as_float(v[j].x), sum.y += __uint_as_float(v[j].y);
            sum.z += __uint_as_float(v[j].z), sum.w += __uint_as_float(v[j].w);
        }
    }
    return sum;
}

// All warps but the one that fetches meet here.
__device__ __forceinline__ void factors_are_there() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * (CONSUMERS + ADDERS)) : "memory");
}

struct Results {
    float* out;  // with SWIGLU float16 [rows, out_stride]
    int rows, outputs, out_stride;
};

// Two rows of the weight and two tokens for each lane.
__device__ __forceinline__ void write(const Results& to, const float4& sum, int group, int pair, int warp, int lane) {
    const int n = pair * (HALVES ? PAIR_ROWS / 2 : PAIR_ROWS) + warp * 16 + (lane >> 2);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int m = 8 * group + 2 * (lane & 3) + e;
        if (m >= to.rows) continue;
        const float factor = __uint_as_float(shared_uint32(FACTORS_AT + 4 * m));
        float* at = to.out + (uint64)m * to.out_stride + n;
        if (n < to.outputs) at[0] = (e ? sum.y : sum.x) * factor;
        if (n + 8 < to.outputs) at[8] = (e ? sum.w : sum.z) * factor;
    }
}

// silu(gate) up, by the approximations of the small kernels in Triton.
__device__ __forceinline__ float swiglu(float gate, float up) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.44269502f));
    return up * (gate * reciprocal(1.0f + power));
}

__device__ __forceinline__ void store_half(float* out, uint64 at, float v) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
    ((unsigned short*)out)[at] = half;
}

// Of a pair of tiles with SWIGLU; ``warp`` counts those of a tile.
__device__ __forceinline__ void write_gated(const Results& to, const float4& gate, const float4& up, int group, int pair, int warp,
                                            int lane) {
    const int n = pair * (PAIR_ROWS / 2) + warp * 16 + (lane >> 2);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int m = 8 * group + 2 * (lane & 3) + e;
        if (m >= to.rows) continue;
        const float factor = __uint_as_float(shared_uint32(FACTORS_AT + 4 * m));
        const float scale = __uint_as_float(shared_uint32(SCALES_AT + 4 * m));
        const uint64 at = (uint64)m * to.out_stride + n;
        store_half(to.out, at, swiglu((e ? gate.y : gate.x) * factor, (e ? up.y : up.x) * factor) * scale);
        store_half(to.out, at + 8, swiglu((e ? gate.w : gate.z) * factor, (e ? up.w : up.z) * factor) * scale);
    }
}

// The warps that have the same rows of both tiles or halves meet, and the first of them finishes what they have.
__device__ __forceinline__ void finish(const Results& to, const float4& sum, int group, int pair, int warp, int lane) {
    if (!SWIGLU && !HALVES) {
        write(to, sum, group, pair, warp, lane);
        return;
    }
    const int of_tile = warp % (CONSUMERS / 2);
    const uint32 at = EXCHANGE_AT + 16 * (32 * of_tile + lane);
    if (warp >= CONSUMERS / 2)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w) : "memory");
    asm volatile("bar.sync %0, 64;" ::"r"(2 + of_tile) : "memory");
    if (warp < CONSUMERS / 2) {
        const uint4 v = shared_uint4(at);
        const float4 other = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
        if (SWIGLU)
            write_gated(to, sum, other, group, pair, of_tile, lane);
        else  // as parts are added up
            write(to, {0.0f + sum.x + other.x, 0.0f + sum.y + other.y, 0.0f + sum.z + other.z, 0.0f + sum.w + other.w}, group, pair,
                  of_tile, lane);
    }
    asm volatile("bar.sync %0, 64;" ::"r"(2 + of_tile) : "memory");
}

// What brings row m of SWIGLU's results into the range of float16: its bound becomes 2^14 to 2^15. The factor undoes it.
__device__ __forceinline__ void scale_row(int m, float bound, float* factors) {
    const int exponent = max((int)(__float_as_uint(bound) >> 23) - 127, -112);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(SCALES_AT + 4 * m), "r"((127 + 14 - exponent) << 23) : "memory");
    if (blockIdx.x == 0) factors[m] = __uint_as_float((127 - 14 + exponent) << 23);
}

// Adds up what the parts of the rest have left, 16 rows of eight tokens to a warp, while the others do whole pairs.
__device__ __forceinline__ void add_up_rest(const Cut& cut, const Results& to, uint4* pieces, int adder, int lane) {
    constexpr int WARPS = SWIGLU ? CONSUMERS / 2 : CONSUMERS;
    const int groups = (to.rows + 7) / 8, tasks = cut.rest * groups * WARPS;
#pragma unroll 1
    for (int task = adder * gridDim.x + blockIdx.x; task < tasks; task += ADDERS * gridDim.x) {
        const int left_by = task % WARPS, group = task / WARPS % groups, pair = task / WARPS / groups;
        const Share share(pair, cut);
        if (share.alone()) continue;
        uint4* piece = pieces + (group * CONSUMERS + left_by) * 32 + lane;
        const float4 sum = of_all_parts<2>({}, piece, share, -1);
        if (SWIGLU)
            write_gated(to, sum, of_all_parts<2>({}, piece + WARPS * 32, share, -1), group, pair, left_by, lane);
        else
            write(to, sum, group, pair, left_by, lane);
    }
}

// x is a tensor [columns / 64, rows, 64] of float16; ``factors`` and ``out`` begin at ``first_row``. ``pieces`` is
// [part, 2, TOKENS / 8, thread], all EMPTY before and after. ``zero`` is 0. With SWIGLU ``norms`` are those of the rows of x,
// squared, ``longest`` the product of the norms of gate's and up's longest rows, and ``out_factors`` what the rows that leave are to
// be multiplied by.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    product(const __grid_constant__ TensorMap x, const uint8* __restrict__ weights, const float* factors, float* out,
            uint4* pieces, int first_row, int rows, int outputs, int out_stride, int tiles, int blocks, int whole,
            int sharers, uint32 zero, const float* norms, float longest, float* out_factors) {
    // Through a shuffle, so that the compiler sees that it is the same for the whole warp, which wgmma needs.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const Cut cut(tiles, blocks, whole, sharers);
    const Results to = {out, rows, outputs, out_stride};
    const int early = min(STAGES, cut.count);
    asm volatile("griddepcontrol.launch_dependents;");

    if (threadIdx.x == 32 * CONSUMERS) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full(stage), 1);
            barrier_init(empty(stage), CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
        asm volatile("fence.proxy.async.shared::cta;");
        // Weights do not depend on the kernel before this one; everything else does.
        for (int stage = 0; stage < early; stage++) fetch_units(stage, weights, cut.at(stage), tiles, blocks);
    }
    __syncthreads();

    if (warp >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == 32 * CONSUMERS) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int stage = 0; stage < early; stage++)
                fetch_x(x_of(stage), &x, first_row, cut.at(stage).block, blocks, full(stage));
            int stage = 0, parity = 0;
#pragma unroll 1
            for (int done = early; done < cut.count; done++) {
                const Step step = cut.at(done);
                barrier_wait(empty(stage), parity);
                fetch_units(stage, weights, step, tiles, blocks);
                fetch_x(x_of(stage), &x, first_row, step.block, blocks, full(stage));
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        } else if (warp > CONSUMERS) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            factors_are_there();
            if (whole) add_up_rest(cut, to, pieces, warp - CONSUMERS - 1, lane);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    FORM form(warp, lane, Opaque{lane & zero});
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x < rows) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(FACTORS_AT + 4 * threadIdx.x), "f"(global_float(factors + threadIdx.x)));
        if (SWIGLU) scale_row(threadIdx.x, global_float(norms + threadIdx.x) * longest, out_factors);
    }
    factors_are_there();
    float sums[TOKENS / 2];  // sums[4 i + 2 r + e]: row g + 8 r of the warp, token 8 i + 2 t + e
    uint32 even[16], odd[16];
    const int groups = (rows + 7) / 8;
    for (int done = 0; done < cut.count;) {
        // Through a shuffle, again for the compiler, which cannot see that waiting leaves the warp together.
        done = __shfl_sync(0xffffffffu, done, 0);
        const Step begin = cut.at(done);
        const int count = min(blocks - begin.block, (done < cut.shared ? cut.shared : cut.count) - done);
        int stage = done % STAGES, parity = done / STAGES & 1;
        done += count;
        float d[2] = {1.0f, 1.0f};
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0.0f;
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            barrier_wait(full(stage), parity);
            form.p = {weights_of(stage) + (warp >> 3) * FORM::BYTES, warp & 7, lane >> 2, lane};
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
            const uint32 block_of_x = x_of(stage) + (HALVES ? (warp >> 3) * BLOCK_BYTES : 0);
            const uint64 b = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((block_of_x >> 4) & 0x3FFF);
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
            if (lane == 0) barrier_arrive(empty(stage));
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) sums[i] *= d[i / 2 % 2];

        const Share share(begin.pair, cut);
        const Groups finishes(share, done == cut.shared, whole, groups);
        if (!share.alone()) leave(sums, pieces + share.piece_of(blockIdx.x) * PIECE + 32 * warp + lane, finishes, groups);
        for (int group = finishes.begin; group < groups; group += finishes.every) {
            const uint4 own = of_group(sums, group);
            float4 sum = {__uint_as_float(own.x), __uint_as_float(own.y), __uint_as_float(own.z), __uint_as_float(own.w)};
            if (!share.alone()) sum = of_all_parts<8>(own, pieces + group * 32 * CONSUMERS + 32 * warp + lane, share, blockIdx.x);
            finish(to, sum, group, begin.pair, warp, lane);
        }
    }
}
