/* Instructions that tinygrad does not execute as the chips do, or slowly: each function has an instruction's name.

The arguments are a wave's buffers, as tinygrad numbers them. Scalar registers 128 to 255 hold the inline constants, 256
and 257 the program counter, so that what is not a vector register is an entry of one array. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

enum { EXEC = 126, M0 = 124, PROGRAM_COUNTER = 256, VECTOR = 256 };
#define ARGUMENTS uint32_t *scalar, uint32_t *vector, uint8_t *memory, uint8_t *lds, uint8_t *scratch, uint32_t *accumulator
#define PASSED scalar, vector, memory, lds, scratch, accumulator
#define INSTRUCTION(name) void name(ARGUMENTS)

typedef uint32_t registers[LANES]; /* one register of all lanes */

static uint64_t word_at(const uint32_t *scalar) {
    uint64_t word;
    memcpy(&word, (void *)(scalar[PROGRAM_COUNTER] | (uint64_t)scalar[PROGRAM_COUNTER + 1] << 32), 8);
    return word;
}

static void go_on(uint32_t *scalar, uint32_t nbytes) { /* those of the instruction */
    scalar[PROGRAM_COUNTER + 1] += scalar[PROGRAM_COUNTER] > UINT32_MAX - nbytes;
    scalar[PROGRAM_COUNTER] += nbytes;
}

static int is_active(const uint32_t *scalar, int lane) { return scalar[EXEC + lane / 32] >> lane % 32 & 1; }
static uint32_t field(uint64_t word, int low, int bits) { return word >> low & ((1u << bits) - 1); }

static uint32_t operand(const uint32_t *scalar, const uint32_t *vector, uint32_t number, int lane) {
    return number < VECTOR ? scalar[number] : vector[(number - VECTOR) * LANES + lane];
}

/* ---------------------------------------------------------------------------------------------------------------------
   v_perm_b32: each byte of the result is one of eight, the sign of one, 0 or 255. */

INSTRUCTION(v_perm_b32_e64) {
    uint64_t word = word_at(scalar);
    uint32_t *result = vector + field(word, 0, 8) * LANES;
    for (int lane = 0; lane < LANES; lane++) {
        if (!is_active(scalar, lane)) continue;
        uint64_t bytes = (uint64_t)operand(scalar, vector, field(word, 32, 9), lane) << 32 |
                         operand(scalar, vector, field(word, 41, 9), lane);
        uint32_t selector = operand(scalar, vector, field(word, 50, 9), lane), value = 0;
        for (int i = 0; i < 4; i++) {
            uint32_t which = selector >> 8 * i & 255;
            uint32_t byte = which < 8    ? bytes >> 8 * which & 255
                            : which < 12 ? 255 * (bytes >> (16 * (which - 8) + 15) & 1)
                            : which == 12 ? 0
                                          : 255;
            value |= byte << 8 * i;
        }
        result[lane] = value;
    }
    go_on(scalar, 8);
}

/* ---------------------------------------------------------------------------------------------------------------------
   Matrix products D = A B + C of M x K and K x M numbers. Lane l holds row l % M of A, or column l % M of B, and of each
   the elements of k from l / M * PER_LANE on; it may hold them in accumulation registers. All lanes take part, whatever
   EXEC says. Products are added in the order of k, each sum rounded to fp32. */

enum type { F32, XF32, F16, BF16, FP8, BF8, I8 };

static float bits_as_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static uint32_t float_as_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

/* A number of 1 + exponent_bits + mantissa_bits, with the bias of IEEE, and one more where FNUZ types are in use. */
static float narrow(uint32_t code, int exponent_bits, int mantissa_bits) {
    int is_fp8 = exponent_bits + mantissa_bits == 7, is_fnuz = FP8_FNUZ && is_fp8;
    int bias = (1 << (exponent_bits - 1)) - 1 + is_fnuz, highest = (1 << exponent_bits) - 1;
    int exponent = code >> mantissa_bits & highest, mantissa = code & ((1 << mantissa_bits) - 1);
    float sign = code >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
    if (is_fnuz && code == 0x80) return NAN;
    if (!is_fnuz && exponent == highest && exponent_bits > 2) { /* numbers of 4 bits are all finite */
        if (!is_fp8 || exponent_bits == 5) return mantissa ? NAN : sign * INFINITY;
        if (mantissa == 7) return NAN; /* e4m3 has no infinity */
    }
    if (!exponent) return sign * ldexpf(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexpf(mantissa | 1 << mantissa_bits, exponent - bias - mantissa_bits);
}

static float half_as_float(uint32_t half, enum type type) {
    return type == F16 ? narrow(half, 5, 10) : bits_as_float(half << 16);
}

static int per_register(enum type type) { return type <= XF32 ? 1 : type <= BF16 ? 2 : 4; }

static float number_of(uint32_t word, enum type type, int index) {
    uint32_t half = word >> 16 * (index & 1) & 0xFFFF, byte = word >> 8 * (index & 3) & 255;
    switch (type) {
    case F32: return bits_as_float(word);
    case XF32: /* 10 bits of mantissa */
        if (isnan(bits_as_float(word))) return NAN;
        return bits_as_float((word + 0xFFF + (word >> 13 & 1)) & 0xFFFFE000);
    case F16:
    case BF16: return half_as_float(FLUSHES_16_BIT && !(half & (type == F16 ? 0x7C00 : 0x7F80)) ? 0 : half, type);
    case FP8: return narrow(byte, 4, 3);
    case BF8: return narrow(byte, 5, 2);
    default: return (int8_t)byte;
    }
}

static inline __attribute__((always_inline)) void multiply(uint32_t *scalar, uint32_t *vector, uint32_t *accumulator,
                                                           const int M, const int K, enum type a_type,
                                                           enum type b_type) {
#ifdef __SSE__
    unsigned int rounding = _mm_getcsr(); /* subnormal numbers count, also where the kernel's other instructions flush */
    _mm_setcsr(0x1F80);
#endif
    uint64_t word = word_at(scalar);
    const int per_lane = K * M / LANES, outputs = M * M / LANES;
    float a[M][K], b[K][M], d[M][M]; /* exact for sums of 1,024 products of bytes */
    for (int which = 0; which < 2; which++) {
        enum type type = which ? b_type : a_type;
        const registers *held = (registers *)(word >> (59 + which) & 1 ? accumulator : vector);
        uint32_t first = field(word, 32 + 9 * which, 9) - VECTOR;
        for (int i = 0; i < per_lane; i++) {
            const uint32_t *words = held[first + i / per_register(type)];
            for (int lane = 0; lane < LANES; lane++) {
                float number = number_of(words[lane], type, i % per_register(type));
                int mn = lane % M, k = lane / M * per_lane + i;
                if (which) b[k][mn] = number;
                else a[mn][k] = number;
            }
        }
    }
    registers *results = (registers *)(word >> 15 & 1 ? accumulator : vector);
    uint32_t third = field(word, 50, 9), to = field(word, 0, 8);
    int is_integer = a_type == I8, flushes = FLUSHES_16_BIT && (a_type == F16 || a_type == BF16);
#define ROW (M == 32 ? 8 * (i / 4) + 4 * (lane / 32) + i % 4 : 4 * (lane / 16) + i)
    uint32_t whole[M][M];
    for (int i = 0; i < outputs; i++)
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t bits = third < VECTOR ? scalar[third] : results[third - VECTOR + i][lane];
            whole[ROW][lane % M] = bits;
            d[ROW][lane % M] = is_integer ? 0 : bits_as_float(bits);
        }
    for (int row = 0; row < M; row++)
        for (int k = 0; k < K; k++)
            for (int column = 0; column < M; column++) d[row][column] += a[row][k] * b[k][column];
    for (int i = 0; i < outputs; i++)
        for (int lane = 0; lane < LANES; lane++) {
            float sum = d[ROW][lane % M];
            uint32_t bits = is_integer ? whole[ROW][lane % M] + (uint32_t)(int32_t)sum : float_as_bits(sum);
            if (flushes && !(bits & 0x7F800000)) bits &= 0x80000000;
            results[to + i][lane] = bits;
        }
#ifdef __SSE__
    _mm_setcsr(rounding);
#endif
    go_on(scalar, 8);
}

#define MFMA(name, M, K, a_type, b_type) \
    INSTRUCTION(v_mfma_##name) { multiply(scalar, vector, accumulator, M, K, a_type, b_type); }
MFMA(f32_32x32x2_f32, 32, 2, F32, F32)
MFMA(f32_16x16x4_f32, 16, 4, F32, F32)
MFMA(f32_32x32x4_xf32, 32, 4, XF32, XF32)
MFMA(f32_16x16x8_xf32, 16, 8, XF32, XF32)
MFMA(f32_32x32x8_f16, 32, 8, F16, F16)
MFMA(f32_16x16x16_f16, 16, 16, F16, F16)
MFMA(f32_32x32x16_f16, 32, 16, F16, F16)
MFMA(f32_16x16x32_f16, 16, 32, F16, F16)
MFMA(f32_32x32x8_bf16, 32, 8, BF16, BF16)
MFMA(f32_16x16x16_bf16, 16, 16, BF16, BF16)
MFMA(f32_32x32x16_bf16, 32, 16, BF16, BF16)
MFMA(f32_16x16x32_bf16, 16, 32, BF16, BF16)
MFMA(f32_32x32x16_fp8_fp8, 32, 16, FP8, FP8)
MFMA(f32_32x32x16_fp8_bf8, 32, 16, FP8, BF8)
MFMA(f32_32x32x16_bf8_fp8, 32, 16, BF8, FP8)
MFMA(f32_32x32x16_bf8_bf8, 32, 16, BF8, BF8)
MFMA(f32_16x16x32_fp8_fp8, 16, 32, FP8, FP8)
MFMA(f32_16x16x32_fp8_bf8, 16, 32, FP8, BF8)
MFMA(f32_16x16x32_bf8_fp8, 16, 32, BF8, FP8)
MFMA(f32_16x16x32_bf8_bf8, 16, 32, BF8, BF8)
MFMA(i32_32x32x16_i8, 32, 16, I8, I8)
MFMA(i32_16x16x32_i8, 16, 32, I8, I8)
MFMA(i32_32x32x32_i8, 32, 32, I8, I8)
MFMA(i32_16x16x64_i8, 16, 64, I8, I8)

/* The types of these stand in fields of the instruction: 0 is FP8 and 1 BF8. machine.py refuses others. */
#define F8F6F4(name, M, K) \
    INSTRUCTION(name) { \
        uint64_t word = word_at(scalar); \
        enum type a_type = field(word, 8, 3) ? BF8 : FP8, b_type = word >> 61 ? BF8 : FP8; \
        multiply(scalar, vector, accumulator, M, K, a_type, b_type); \
    }
F8F6F4(v_mfma_f32_32x32x64_f8f6f4, 32, 64)
F8F6F4(v_mfma_f32_16x16x128_f8f6f4, 16, 128)

/* ---------------------------------------------------------------------------------------------------------------------
   Memory and LDS, at any address: compilers rely on no alignment. A buffer's addresses are a base in four scalar registers
   plus offsets. What ends after the buffer's size reads as 0 and is not written, each word of a longer access by itself.
   Indices and swizzling are refused by machine.py. */

/* Memory that is accessed by its own bytes alone, not by all of the pages that hold it. */
struct extent {
    uint64_t first, last; /* its bytes, the last one excluded */
    uint64_t begin, end;  /* the pages */
};
static const struct extent everything = {0, UINT64_MAX, 0, UINT64_MAX}, *extents, *recent = &everything;
static int n_extents;
enum { FAULT = 2, LANES_DISAGREE, DROPPED };           /* as in wave.c */
static void (*fault_at)(uint64_t address, int outcome); /* of wave.c */

void hold_to(const struct extent *held, int count, void (*fault)(uint64_t, int)) { /* to none: all may be accessed */
    fault_at = fault;
    extents = held;
    n_extents = count;
    recent = count ? held : &everything;
}

static void require_within(const uint8_t *at, uint64_t nbytes) {
    uint64_t first = (uint64_t)at, last = first + nbytes;
    if (first >= recent->first && last <= recent->last) return;
    for (const struct extent *each = extents; each < extents + n_extents; each++) {
        if (last <= each->begin || first >= each->end) continue;
        if (first < each->first) fault_at(first, FAULT);
        if (last > each->last) fault_at(first > each->last ? first : each->last, FAULT);
        recent = each;
    }
}

struct access {
    uint64_t word;
    uint32_t *given, *returned; /* the first register that is read, or written */
    uint8_t *at;
    int64_t offset; /* of the instruction */
    uint64_t left;  /* bytes of the buffer from there on */
};

#define REACH struct access *access, int lane, ARGUMENTS
#define REACHED &access, lane, PASSED

static uint32_t *data_of(uint64_t word, int at, int lane, uint32_t *vector, uint32_t *accumulator) {
    return (word >> 55 & 1 ? accumulator : vector) + field(word, at, 8) * LANES + lane;
}

enum { WHOLE_POINTER = 0x7FFFFFF0 };

/* Whether the lane is active; then access is where it goes. */
static int reach_buffer(REACH) {
    uint64_t word = access->word = word_at(scalar);
    access->given = access->returned = data_of(word, 40, lane, vector, accumulator);
    const uint32_t *descriptor = scalar + 4 * field(word, 48, 5);
    uint64_t base = descriptor[0] | (uint64_t)(descriptor[1] & 0xFFFF) << 32;
    uint64_t offset = word >> 12 & 1 ? vector[field(word, 32, 8) * LANES + lane] : 0;
    access->offset = field(word, 0, 12);
    offset += access->offset + (uint64_t)scalar[word >> 56];
    access->left = offset < descriptor[2] ? descriptor[2] - offset : 0;
    /* A sum of whole numbers: of pointers a compiler may take for granted that memory, which is 0, is none. */
    access->at = (uint8_t *)((uint64_t)memory + base + offset);
    if (!is_active(scalar, lane)) return 0;
    /* Triton makes buffers of this size of pointers, and takes all offsets for positive. INT_MIN is that of no access. */
    if (descriptor[2] >= WHOLE_POINTER && (int32_t)offset < 0 && (int32_t)offset >= -WHOLE_POINTER / 2)
        fault_at((uint64_t)memory + base + (uint64_t)(int32_t)offset, DROPPED);
    return 1;
}

static int reach_global(REACH) { /* flat accesses, too, which have no scalar base; what they reach is global memory */
    uint64_t word = access->word = word_at(scalar);
    access->given = data_of(word, 40, lane, vector, accumulator);
    access->returned = data_of(word, 56, lane, vector, accumulator);
    uint32_t base = field(word, 14, 2) ? field(word, 48, 7) : 0x7F, *low = vector + field(word, 32, 8) * LANES + lane;
    access->offset = (int32_t)(field(word, 0, 13) << 19) >> 19;
    uint64_t at = *low;
    at |= base < 0x7F ? 0 : (uint64_t)low[LANES] << 32;
    at += base < 0x7F ? scalar[base] | (uint64_t)scalar[base + 1] << 32 : 0;
    access->at = (uint8_t *)((uint64_t)memory + at + access->offset), access->left = UINT64_MAX;
    return is_active(scalar, lane);
}

static int reach_lds(REACH) {
    uint64_t word = access->word = word_at(scalar);
    uint32_t *registers_of = word >> 25 & 1 ? accumulator : vector;
    access->given = registers_of + field(word, 40, 8) * LANES + lane;
    access->returned = registers_of + field(word, 56, 8) * LANES + lane;
    access->offset = field(word, 0, 16), access->left = UINT64_MAX;
    access->at = lds + vector[field(word, 32, 8) * LANES + lane] + access->offset;
    return is_active(scalar, lane);
}

enum part { WHOLE, LOW, HIGH }; /* of a register that a byte or a half goes to, or comes from */

/* goes_to_lds: whether the data go there, lane after lane from M0 on, and not into registers */
#define LOAD(name, reach, goes_to_lds, type, count, part) \
    INSTRUCTION(name) { \
        struct access access; \
        for (int lane = 0; lane < LANES; lane++) { \
            if (!reach(REACHED)) continue; \
            type read[count] = {0}; \
            for (int i = 0; i < count && access.left >= (i + 1) * sizeof(type); i++) { \
                require_within(access.at + i * sizeof(type), sizeof(type)); \
                memcpy(read + i, access.at + i * sizeof(type), sizeof(type)); \
            } \
            if (goes_to_lds) { \
                uint8_t *to = lds + (scalar[M0] & 0x3FFFF) + access.offset + lane * sizeof read; \
                require_within(to, sizeof read); \
                memcpy(to, read, sizeof read); \
                continue; \
            } \
            for (int i = 0; i < count; i++) { \
                uint32_t *held = access.returned + i * LANES; \
                *held = part == WHOLE  ? (uint32_t)read[i] \
                        : part == LOW ? (*held & 0xFFFF0000) | ((uint32_t)read[i] & 0xFFFF) \
                                      : (*held & 0xFFFF) | (uint32_t)read[i] << 16; \
            } \
        } \
        go_on(scalar, 8); \
    }

/* A second pass looks whether the data of each lane have stayed in memory: the chips do not say whose would. */
#define STORE(name, reach, type, count, part) \
    INSTRUCTION(name) { \
        struct access access; \
        for (int pass = 0; pass < 1 + (reach != reach_lds); pass++) \
            for (int lane = 0; lane < LANES; lane++) { \
                if (!reach(REACHED)) continue; \
                for (int i = 0; i < count && access.left >= (i + 1) * sizeof(type); i++) { \
                    type written = access.given[i * LANES] >> (part == HIGH ? 16 : 0); \
                    uint8_t *at = access.at + i * sizeof(type); \
                    if (pass == 0) { \
                        require_within(at, sizeof(type)); \
                        memcpy(at, &written, sizeof(type)); \
                    } else if (memcmp(at, &written, sizeof(type))) { \
                        fault_at((uint64_t)at, LANES_DISAGREE); \
                    } \
                } \
            } \
        go_on(scalar, 8); \
    }

#define ANYWHERE(which, name, ...) \
    which(buffer_##name, reach_buffer, __VA_ARGS__) \
    which(global_##name, reach_global, __VA_ARGS__) \
    which(flat_##name, reach_global, __VA_ARGS__)
#define LOAD_BUFFER(name, reach, ...) LOAD(name, reach, access.word >> 16 & 1, __VA_ARGS__)
#define LOAD_OTHER(name, reach, ...) LOAD(name, reach, 0, __VA_ARGS__)
#define LOAD_ANYWHERE(name, ...) \
    LOAD_BUFFER(buffer_load_##name, reach_buffer, __VA_ARGS__) \
    LOAD_OTHER(global_load_##name, reach_global, __VA_ARGS__) \
    LOAD_OTHER(flat_load_##name, reach_global, __VA_ARGS__)
LOAD_ANYWHERE(ubyte, uint8_t, 1, WHOLE)
LOAD_ANYWHERE(sbyte, int8_t, 1, WHOLE)
LOAD_ANYWHERE(ushort, uint16_t, 1, WHOLE)
LOAD_ANYWHERE(sshort, int16_t, 1, WHOLE)
LOAD_ANYWHERE(dword, uint32_t, 1, WHOLE)
LOAD_ANYWHERE(dwordx2, uint32_t, 2, WHOLE)
LOAD_ANYWHERE(dwordx3, uint32_t, 3, WHOLE)
LOAD_ANYWHERE(dwordx4, uint32_t, 4, WHOLE)
LOAD_ANYWHERE(ubyte_d16, uint8_t, 1, LOW)
LOAD_ANYWHERE(ubyte_d16_hi, uint8_t, 1, HIGH)
LOAD_ANYWHERE(sbyte_d16, int8_t, 1, LOW)
LOAD_ANYWHERE(sbyte_d16_hi, int8_t, 1, HIGH)
LOAD_ANYWHERE(short_d16, uint16_t, 1, LOW)
LOAD_ANYWHERE(short_d16_hi, uint16_t, 1, HIGH)
LOAD(global_load_lds_dword, reach_global, 1, uint32_t, 1, WHOLE)
LOAD(global_load_lds_dwordx3, reach_global, 1, uint32_t, 3, WHOLE)
LOAD(global_load_lds_dwordx4, reach_global, 1, uint32_t, 4, WHOLE)

ANYWHERE(STORE, store_byte, uint8_t, 1, LOW)
ANYWHERE(STORE, store_byte_d16_hi, uint8_t, 1, HIGH)
ANYWHERE(STORE, store_short, uint16_t, 1, LOW)
ANYWHERE(STORE, store_short_d16_hi, uint16_t, 1, HIGH)
ANYWHERE(STORE, store_dword, uint32_t, 1, WHOLE)
ANYWHERE(STORE, store_dwordx2, uint32_t, 2, WHOLE)
ANYWHERE(STORE, store_dwordx3, uint32_t, 3, WHOLE)
ANYWHERE(STORE, store_dwordx4, uint32_t, 4, WHOLE)

LOAD_OTHER(ds_read_u8, reach_lds, uint8_t, 1, WHOLE)
LOAD_OTHER(ds_read_i8, reach_lds, int8_t, 1, WHOLE)
LOAD_OTHER(ds_read_u16, reach_lds, uint16_t, 1, WHOLE)
LOAD_OTHER(ds_read_i16, reach_lds, int16_t, 1, WHOLE)
LOAD_OTHER(ds_read_b32, reach_lds, uint32_t, 1, WHOLE)
LOAD_OTHER(ds_read_b64, reach_lds, uint32_t, 2, WHOLE)
LOAD_OTHER(ds_read_b96, reach_lds, uint32_t, 3, WHOLE)
LOAD_OTHER(ds_read_b128, reach_lds, uint32_t, 4, WHOLE)
LOAD_OTHER(ds_read_u8_d16, reach_lds, uint8_t, 1, LOW)
LOAD_OTHER(ds_read_u8_d16_hi, reach_lds, uint8_t, 1, HIGH)
LOAD_OTHER(ds_read_i8_d16, reach_lds, int8_t, 1, LOW)
LOAD_OTHER(ds_read_i8_d16_hi, reach_lds, int8_t, 1, HIGH)
LOAD_OTHER(ds_read_u16_d16, reach_lds, uint16_t, 1, LOW)
LOAD_OTHER(ds_read_u16_d16_hi, reach_lds, uint16_t, 1, HIGH)
STORE(ds_write_b8, reach_lds, uint8_t, 1, LOW)
STORE(ds_write_b8_d16_hi, reach_lds, uint8_t, 1, HIGH)
STORE(ds_write_b16, reach_lds, uint16_t, 1, LOW)
STORE(ds_write_b16_d16_hi, reach_lds, uint16_t, 1, HIGH)
STORE(ds_write_b32, reach_lds, uint32_t, 1, WHOLE)
STORE(ds_write_b64, reach_lds, uint32_t, 2, WHOLE)
STORE(ds_write_b96, reach_lds, uint32_t, 3, WHOLE)
STORE(ds_write_b128, reach_lds, uint32_t, 4, WHOLE)

/* Two places of LDS, at offsets in elements, or in 64 elements. */
static void move_pair(ARGUMENTS, int words, int stride, int reads) {
    uint64_t word = word_at(scalar);
    uint32_t *registers_of = word >> 25 & 1 ? accumulator : vector;
    for (int lane = 0; lane < LANES; lane++) {
        if (!is_active(scalar, lane)) continue;
        uint32_t address = vector[field(word, 32, 8) * LANES + lane];
        for (int which = 0; which < 2; which++) {
            uint8_t *at = lds + address + field(word, 8 * which, 8) * 4 * words * stride;
            uint32_t first = reads ? field(word, 56, 8) + which * words : field(word, 40 + 8 * which, 8);
            for (int i = 0; i < words; i++) {
                uint32_t *held = registers_of + (first + i) * LANES + lane;
                require_within(at + 4 * i, 4);
                if (reads) memcpy(held, at + 4 * i, 4);
                else memcpy(at + 4 * i, held, 4);
            }
        }
    }
    go_on(scalar, 8);
}

#define PAIR(suffix, words, stride) \
    INSTRUCTION(ds_read2##suffix) { move_pair(PASSED, words, stride, 1); } \
    INSTRUCTION(ds_write2##suffix) { move_pair(PASSED, words, stride, 0); }
PAIR(_b32, 1, 1)
PAIR(_b64, 2, 1)
PAIR(st64_b32, 1, 64)
PAIR(st64_b64, 2, 64)

/* Caches are not modelled. */
INSTRUCTION(buffer_inv) { go_on(scalar, 8); }
INSTRUCTION(buffer_wbl2) { go_on(scalar, 8); }

/* No other workgroup runs at the same time, so a read and a write are atomic. If the bit `returns` is set, the lane gets
   what was there before. `new` is an expression of old, given and compared, which only cmpswap has. */
#define ATOMIC(name, reach, returns, type, operands, new) \
    INSTRUCTION(name) { \
        struct access access; \
        for (int lane = 0; lane < LANES; lane++) { \
            if (!reach(REACHED)) continue; \
            type old = {0}, given, compared; \
            uint32_t words[operands * sizeof(type) / 4]; \
            for (int i = 0; i < (int)(sizeof words / 4); i++) words[i] = access.given[i * LANES]; \
            memcpy(&given, words, sizeof given); \
            memcpy(&compared, words + (operands - 1) * sizeof(type) / 4, sizeof compared); \
            (void)compared; \
            if (access.left >= sizeof(type)) { \
                require_within(access.at, sizeof(type)); \
                memcpy(&old, access.at, sizeof old); \
                type next = new; \
                memcpy(access.at, &next, sizeof next); \
            } \
            memcpy(words, &old, sizeof old); \
            for (int i = 0; i < (int)(sizeof(type) / 4) && access.word >> returns & 1; i++) \
                access.returned[i * LANES] = words[i]; \
        } \
        go_on(scalar, 8); \
    }
#define ATOMIC_ANYWHERE(name, type, operands, new) \
    ATOMIC(buffer_atomic_##name, reach_buffer, 14, type, operands, new) \
    ATOMIC(global_atomic_##name, reach_global, 16, type, operands, new) \
    ATOMIC(flat_atomic_##name, reach_global, 16, type, operands, new)
#define ATOMICS(name, type, wide, operands, new) \
    ATOMIC_ANYWHERE(name, type, operands, new) \
    ATOMIC_ANYWHERE(name##_x2, wide, operands, new)
ATOMICS(swap, uint32_t, uint64_t, 1, given)
ATOMICS(cmpswap, uint32_t, uint64_t, 2, old == compared ? given : old)
ATOMICS(add, uint32_t, uint64_t, 1, old + given)
ATOMICS(sub, uint32_t, uint64_t, 1, old - given)
ATOMICS(smin, int32_t, int64_t, 1, old < given ? old : given)
ATOMICS(umin, uint32_t, uint64_t, 1, old < given ? old : given)
ATOMICS(smax, int32_t, int64_t, 1, old > given ? old : given)
ATOMICS(umax, uint32_t, uint64_t, 1, old > given ? old : given)
ATOMICS(and, uint32_t, uint64_t, 1, old & given)
ATOMICS(or, uint32_t, uint64_t, 1, old | given)
ATOMICS(xor, uint32_t, uint64_t, 1, old ^ given)
ATOMIC_ANYWHERE(add_f32, float, 1, old + given)
ATOMIC_ANYWHERE(add_f64, double, 1, old + given)
ATOMIC_ANYWHERE(min_f64, double, 1, fmin(old, given))
ATOMIC_ANYWHERE(max_f64, double, 1, fmax(old, given))

static uint32_t rounded_half(float number, enum type type) { /* to the nearest even */
    uint32_t bits = float_as_bits(number), sign = bits >> 16 & 0x8000;
    if (isnan(number)) return type == F16 ? 0x7E00 : 0x7FC0;
    if (type == BF16) return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    float magnitude = fminf(fabsf(number), 0x1p16f); /* which becomes infinity */
    int exponent = magnitude < 0x1p-14f ? -14 : ilogbf(magnitude); /* of subnormal numbers that of the smallest normal */
    return ((uint32_t)rintf(ldexpf(magnitude, 10 - exponent)) + (exponent + 14) * 1024) | sign;
}

static uint32_t sum_of_halves(uint32_t first, uint32_t second, enum type type) {
    float low = half_as_float(first & 0xFFFF, type) + half_as_float(second & 0xFFFF, type);
    float high = half_as_float(first >> 16, type) + half_as_float(second >> 16, type);
    return rounded_half(low, type) | rounded_half(high, type) << 16;
}
ATOMIC_ANYWHERE(pk_add_f16, uint32_t, 1, sum_of_halves(old, given, F16))
ATOMIC_ANYWHERE(pk_add_bf16, uint32_t, 1, sum_of_halves(old, given, BF16))

/* ---------------------------------------------------------------------------------------------------------------------
   Numbers of 8 bits, and of 4 in pairs, become longer ones. The first form takes the byte or half that SDWA selects, the
   scaled one a byte or half by two bits of the instruction, and multiplies by the power of two of the second operand. */

enum { SDWA = 0xF9 };

static void widen(ARGUMENTS, int count, int exponent_bits, int is_long) {
    uint64_t word = word_at(scalar);
    int is_sdwa = !is_long && field(word, 0, 9) == SDWA;
    uint32_t source = is_sdwa   ? field(word, 32, 8) + (word >> 55 & 1 ? 0 : VECTOR)
                      : is_long ? field(word, 32, 9)
                                : field(word, 0, 9);
    uint32_t select = is_sdwa ? field(word, 48, 3) : 6; /* bytes 0 to 3, halves 4 and 5, or the whole */
    uint32_t *result = vector + field(word, is_long ? 0 : 17, 8) * LANES;
    for (int lane = 0; lane < LANES; lane++) {
        if (!is_active(scalar, lane)) continue;
        uint32_t codes = operand(scalar, vector, source, lane) >> (select < 4 ? 8 * select : select == 5 ? 16 : 0);
        for (int i = 0; i < count; i++)
            result[i * LANES + lane] = float_as_bits(narrow(codes >> 8 * i & 255, exponent_bits, 7 - exponent_bits));
    }
    go_on(scalar, is_sdwa || is_long ? 8 : 4);
}

#define WIDEN(name, count, exponent_bits) \
    INSTRUCTION(v_cvt_##name##_e32) { widen(PASSED, count, exponent_bits, 0); } \
    INSTRUCTION(v_cvt_##name##_e64) { widen(PASSED, count, exponent_bits, 1); }
WIDEN(f32_fp8, 1, 4)
WIDEN(f32_bf8, 1, 5)
WIDEN(pk_f32_fp8, 2, 4)
WIDEN(pk_f32_bf8, 2, 5)

static void widen_scaled(ARGUMENTS, int count, int bits, int exponent_bits, enum type to) {
    uint64_t word = word_at(scalar);
    uint32_t *result = vector + field(word, 0, 8) * LANES, select = field(word, 11, 2);
    for (int lane = 0; lane < LANES; lane++) {
        if (!is_active(scalar, lane)) continue;
        uint32_t codes = operand(scalar, vector, field(word, 32, 9), lane) >> count * bits * select;
        int exponent = operand(scalar, vector, field(word, 41, 9), lane) >> 23 & 255;
        float numbers[2] = {0};
        for (int i = 0; i < count; i++) {
            float number = narrow(codes >> bits * i & ((1 << bits) - 1), exponent_bits, bits - 1 - exponent_bits);
            numbers[i] = exponent == 255 ? NAN : ldexpf(number, exponent - 127);
        }
        for (int i = 0; i < count && to == F32; i++) result[i * LANES + lane] = float_as_bits(numbers[i]);
        if (to != F32) result[lane] = rounded_half(numbers[0], to) | rounded_half(numbers[1], to) << 16;
    }
    go_on(scalar, 8);
}

#define WIDEN_SCALED(name, count, bits, exponent_bits, to) \
    INSTRUCTION(v_cvt_scalef32_##name) { widen_scaled(PASSED, count, bits, exponent_bits, to); }
WIDEN_SCALED(f32_fp8, 1, 8, 4, F32)
WIDEN_SCALED(f32_bf8, 1, 8, 5, F32)
WIDEN_SCALED(pk_f32_fp8, 2, 8, 4, F32)
WIDEN_SCALED(pk_f32_bf8, 2, 8, 5, F32)
WIDEN_SCALED(pk_f32_fp4, 2, 4, 2, F32)
WIDEN_SCALED(pk_f16_fp8, 2, 8, 4, F16)
WIDEN_SCALED(pk_f16_bf8, 2, 8, 5, F16)
WIDEN_SCALED(pk_f16_fp4, 2, 4, 2, F16)
WIDEN_SCALED(pk_bf16_fp8, 2, 8, 4, BF16)
WIDEN_SCALED(pk_bf16_bf8, 2, 8, 5, BF16)
WIDEN_SCALED(pk_bf16_fp4, 2, 4, 2, BF16)

/* In each 16 lanes, half n of lane l is half l % 4 at the address of lane l / 4 + 4 n. */
INSTRUCTION(ds_read_b64_tr_b16) {
    uint64_t word = word_at(scalar);
    const registers *address = (registers *)vector + field(word, 32, 8);
    registers *result = (registers *)(word >> 25 & 1 ? accumulator : vector) + (word >> 56);
    uint16_t read[LANES][4];
    for (int lane = 0; lane < LANES; lane++)
        for (int n = 0; n < 4 && is_active(scalar, lane); n++) {
            uint32_t at = (*address)[(lane & ~15) + lane % 16 / 4 + 4 * n] + field(word, 0, 16) + 2 * (lane % 4);
            require_within(lds + at, 2);
            memcpy(&read[lane][n], lds + at, 2);
        }
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 2 && is_active(scalar, lane); i++) memcpy(&result[i][lane], &read[lane][2 * i], 4);
    go_on(scalar, 8);
}
