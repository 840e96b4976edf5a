/* What the instructions of cdna.c and rdna.c share: numbers, memory, LDS and atomics.

Each of these files has instructions that tinygrad does not execute as the chips do, or slowly: a function has an
instruction's name. LANES, M0 and the numbers of a chip are the compiler's options: see machine.py.

The arguments are a wave's buffers, as tinygrad numbers them. Scalar registers 128 to 255 hold the inline constants, 256
and 257 the program counter, so that what is not a vector register is an entry of one array. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

enum { EXEC = 126, PROGRAM_COUNTER = 256, VECTOR = 256 };
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
   Numbers */

enum type { F32, XF32, F16, BF16, FP8, BF8, I8, U8 };

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
    case I8: return (int8_t)byte;
    default: return byte;
    }
}

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
    uint32_t nbytes; /* of the instruction */
};

#define REACH struct access *access, int lane, ARGUMENTS
#define REACHED &access, lane, PASSED

enum { WHOLE_POINTER = 0x7FFFFFF0 };

/* Whether the lane is active; then access is where it goes, by two offsets to the base of a buffer. The first is a sum of
   32 bits: compilers take a part of it, which may be negative, into the instruction. */
static int reach_by_descriptor(struct access *access, int lane, const uint32_t *scalar, uint8_t *memory, uint32_t at,
                               uint32_t offset_of_lane, uint32_t added) {
    const uint32_t *descriptor = scalar + at;
    uint64_t offset = (uint64_t)offset_of_lane + added;
    uint64_t base = descriptor[0] | (uint64_t)(descriptor[1] & 0xFFFF) << 32;
    access->left = offset < descriptor[2] ? descriptor[2] - offset : 0;
    /* A sum of whole numbers: of pointers a compiler may take for granted that memory, which is 0, is none. */
    access->at = (uint8_t *)((uint64_t)memory + base + offset);
    if (!is_active(scalar, lane)) return 0;
    /* Triton makes buffers of this size of pointers, and takes all offsets for positive. INT_MIN is that of no access. */
    if (descriptor[2] >= WHOLE_POINTER && (int32_t)offset < 0 && (int32_t)offset >= -WHOLE_POINTER / 2)
        fault_at((uint64_t)memory + base + (uint64_t)(int32_t)offset, DROPPED);
    return 1;
}

static int reach_lds(REACH) {
    uint64_t word = access->word = word_at(scalar);
    uint32_t *registers_of = word >> 25 & 1 ? accumulator : vector;
    access->given = registers_of + field(word, 40, 8) * LANES + lane;
    access->returned = registers_of + field(word, 56, 8) * LANES + lane;
    access->offset = field(word, 0, 16), access->left = UINT64_MAX, access->nbytes = 8;
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
        go_on(scalar, access.nbytes); \
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
        go_on(scalar, access.nbytes); \
    }

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
        go_on(scalar, access.nbytes); \
    }

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

/* Bytes of an operand, from bit `shift` on, become as many numbers of 32 bits. */
static inline void widen_bytes(uint32_t *scalar, uint32_t *vector, uint32_t source, uint32_t shift, uint32_t to,
                               int count, int exponent_bits) {
    uint32_t *result = vector + to * LANES;
    for (int lane = 0; lane < LANES; lane++) {
        if (!is_active(scalar, lane)) continue;
        uint32_t codes = operand(scalar, vector, source, lane) >> shift;
        for (int i = 0; i < count; i++)
            result[i * LANES + lane] = float_as_bits(narrow(codes >> 8 * i & 255, exponent_bits, 7 - exponent_bits));
    }
}

#define WIDEN(name, count, exponent_bits) \
    INSTRUCTION(v_cvt_##name##_e32) { widen(PASSED, count, exponent_bits, 0); } \
    INSTRUCTION(v_cvt_##name##_e64) { widen(PASSED, count, exponent_bits, 1); }
#define WIDEN_ALL \
    WIDEN(f32_fp8, 1, 4) WIDEN(f32_bf8, 1, 5) \
    WIDEN(pk_f32_fp8, 2, 4) WIDEN(pk_f32_bf8, 2, 5)
