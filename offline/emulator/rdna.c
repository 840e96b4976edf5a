/* Instructions of RDNA 3 (GFX 11) and RDNA 4 (GFX 12), in waves of 32 lanes: see instructions.h. */
#include "instructions.h"

/* ---------------------------------------------------------------------------------------------------------------------
   Matrix products D = A B + C of 16 x 16 numbers, which all lanes take part in, whatever EXEC says. Products are added in
   the order of k, each sum rounded to fp32. Lane l holds row l % 16 of A and column l % 16 of B: with GFX 11 the whole,
   which both halves of the wave must hold alike, with GFX 12 the first or the second 8 elements of k. */

enum { M = 16, OUTPUTS = M * M / LANES, PER_LANE = GFX == 11 ? M : M / 2 };

static int row_of(int lane, int i) { return GFX == 11 ? 2 * i + lane / M : i + OUTPUTS * (lane / M); }

static inline __attribute__((always_inline)) void multiply(uint32_t *scalar, uint32_t *vector, enum type a_type,
                                                           enum type b_type) {
#ifdef __SSE__
    unsigned int rounding = _mm_getcsr(); /* subnormal numbers count, also where the kernel's other instructions flush */
    _mm_setcsr(0x1F80);
#endif
    uint64_t word = word_at(scalar);
    int is_integer = a_type >= I8;
    float a[M][M], b[M][M], d[M][M];
    for (int which = 0; which < 2; which++) {
        enum type type = which ? b_type : a_type;
        uint32_t first = field(word, 32 + 9 * which, 9) - VECTOR;
        for (int i = 0; i < PER_LANE; i++) {
            const uint32_t *words = vector + (first + i / per_register(type)) * LANES;
            for (int lane = 0; lane < LANES; lane++) {
                float number = number_of(words[lane], type, i % per_register(type));
                float *to = which ? &b[GFX == 11 ? i : lane / M * PER_LANE + i][lane % M]
                                  : &a[lane % M][GFX == 11 ? i : lane / M * PER_LANE + i];
                int is_copy = GFX == 11 && lane >= M;
                *to = is_copy && !is_integer && *to != number ? NAN : number;
            }
        }
    }
    uint32_t third = field(word, 50, 9), *results = vector + field(word, 0, 8) * LANES, whole[M][M];
    for (int i = 0; i < OUTPUTS; i++)
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t bits = third < VECTOR ? scalar[third] : vector[(third - VECTOR + i) * LANES + lane];
            whole[row_of(lane, i)][lane % M] = bits;
            d[row_of(lane, i)][lane % M] = is_integer ? 0 : bits_as_float(bits);
        }
    for (int row = 0; row < M; row++)
        for (int k = 0; k < M; k++)
            for (int column = 0; column < M; column++) d[row][column] += a[row][k] * b[k][column];
    for (int i = 0; i < OUTPUTS; i++)
        for (int lane = 0; lane < LANES; lane++) {
            int row = row_of(lane, i), column = lane % M;
            uint32_t sum = is_integer ? whole[row][column] + (uint32_t)(int32_t)d[row][column]
                                      : float_as_bits(d[row][column]);
            results[i * LANES + lane] = sum;
        }
#ifdef __SSE__
    _mm_setcsr(rounding);
#endif
    go_on(scalar, 8);
}

#define WMMA(name, a_type, b_type) \
    INSTRUCTION(v_wmma_##name) { multiply(scalar, vector, a_type, b_type); }
WMMA(f32_16x16x16_f16, F16, F16)
WMMA(f32_16x16x16_bf16, BF16, BF16)
WMMA(f32_16x16x16_fp8_fp8, FP8, FP8)
WMMA(f32_16x16x16_fp8_bf8, FP8, BF8)
WMMA(f32_16x16x16_bf8_fp8, BF8, FP8)
WMMA(f32_16x16x16_bf8_bf8, BF8, BF8)

/* Bits of the instruction tell whether the bytes of A and B have signs. */
INSTRUCTION(v_wmma_i32_16x16x16_iu8) {
    uint64_t word = word_at(scalar);
    multiply(scalar, vector, word >> 61 & 1 ? I8 : U8, word >> 62 & 1 ? I8 : U8);
}

/* ---------------------------------------------------------------------------------------------------------------------
   Memory and LDS */

enum { NULL_REGISTER = 124, SCRATCH_STRIDE = 259 };

/* Where the operands of an instruction stand, which are words of 8 bytes in RDNA 3 and of 12 in RDNA 4. */
struct place {
    uint32_t address, given, returned; /* vector registers */
    uint32_t base;                     /* a scalar register, or NULL_REGISTER */
    int64_t offset;
    int has_address; /* of scratch and buffers */
    uint32_t added;  /* of buffers: a scalar register */
};

#if GFX == 11
enum { NBYTES = 8, RETURNS = 14 };

static struct place place_of(uint64_t word, const uint32_t *scalar) {
    (void)scalar;
    return (struct place){
        .address = field(word, 32, 8), .given = field(word, 40, 8), .returned = field(word, 56, 8),
        .base = field(word, 48, 7), .has_address = word >> 55 & 1, .offset = (int32_t)(field(word, 0, 13) << 19) >> 19,
    };
}

static struct place place_in_buffer(uint64_t word, const uint32_t *scalar) {
    (void)scalar;
    return (struct place){
        .address = field(word, 32, 8), .given = field(word, 40, 8), .returned = field(word, 40, 8),
        .base = field(word, 48, 5) * 4, .has_address = word >> 54 & 1, .offset = field(word, 0, 12), .added = word >> 56,
    };
}
#else
enum { NBYTES = 12, RETURNS = 52 };

static uint32_t last_word(const uint32_t *scalar) {
    uint32_t word;
    memcpy(&word, (void *)((scalar[PROGRAM_COUNTER] | (uint64_t)scalar[PROGRAM_COUNTER + 1] << 32) + 8), 4);
    return word;
}

static struct place place_of(uint64_t word, const uint32_t *scalar) {
    uint32_t last = last_word(scalar);
    return (struct place){
        .address = last & 255, .given = field(word, 55, 8), .returned = field(word, 32, 8), .base = field(word, 0, 7),
        .has_address = word >> 49 & 1, .offset = (int32_t)last >> 8,
    };
}

static struct place place_in_buffer(uint64_t word, const uint32_t *scalar) {
    uint32_t last = last_word(scalar);
    return (struct place){
        .address = last & 255, .given = field(word, 32, 8), .returned = field(word, 32, 8), .base = field(word, 41, 9),
        .has_address = word >> 62 & 1, .offset = last >> 8, .added = field(word, 0, 7),
    };
}
#endif

static void begin_access(struct access *access, struct place place, int lane, uint32_t *vector) {
    access->given = vector + place.given * LANES + lane;
    access->returned = vector + place.returned * LANES + lane;
    access->offset = place.offset, access->left = UINT64_MAX, access->nbytes = NBYTES;
}

static int reach_buffer(REACH) {
    struct place place = place_in_buffer(access->word = word_at(scalar), scalar);
    begin_access(access, place, lane, vector);
    uint32_t offset = place.has_address ? vector[place.address * LANES + lane] : 0;
    offset += place.offset;
    return reach_by_descriptor(access, lane, scalar, memory, place.base, offset, scalar[place.added]);
}

static int reach_global(REACH) { /* flat accesses, too: what they reach is global memory */
    struct place place = place_of(access->word = word_at(scalar), scalar);
    begin_access(access, place, lane, vector);
    uint32_t *low = vector + place.address * LANES + lane;
    uint64_t at = place.base == NULL_REGISTER
                      ? *low | (uint64_t)low[LANES] << 32
                      : *low + (scalar[place.base] | (uint64_t)scalar[place.base + 1] << 32);
    access->at = (uint8_t *)((uint64_t)memory + at + place.offset);
    return is_active(scalar, lane);
}

static int reach_scratch(REACH) { /* each lane has its own bytes; an access that begins beside them is a fault */
    struct place place = place_of(access->word = word_at(scalar), scalar);
    begin_access(access, place, lane, vector);
    int64_t at = place.offset + (int32_t)scalar[place.base]; /* NULL_REGISTER holds 0 */
    at += place.has_address ? (int32_t)vector[place.address * LANES + lane] : 0;
    access->at = scratch + (int64_t)lane * scalar[SCRATCH_STRIDE] + at;
    if (is_active(scalar, lane) && (at < 0 || at >= scalar[SCRATCH_STRIDE])) fault_at((uint64_t)access->at, FAULT);
    return is_active(scalar, lane);
}

#define ANYWHERE(which, name, ...) \
    which(buffer_##name, reach_buffer, __VA_ARGS__) \
    which(global_##name, reach_global, __VA_ARGS__) \
    which(flat_##name, reach_global, __VA_ARGS__)
#define EVERYWHERE(which, name, ...) \
    ANYWHERE(which, name, __VA_ARGS__) \
    which(scratch_##name, reach_scratch, __VA_ARGS__)
#define LOAD_REGISTERS(name, reach, ...) LOAD(name, reach, 0, __VA_ARGS__)
EVERYWHERE(LOAD_REGISTERS, load_u8, uint8_t, 1, WHOLE)
EVERYWHERE(LOAD_REGISTERS, load_i8, int8_t, 1, WHOLE)
EVERYWHERE(LOAD_REGISTERS, load_u16, uint16_t, 1, WHOLE)
EVERYWHERE(LOAD_REGISTERS, load_i16, int16_t, 1, WHOLE)
EVERYWHERE(LOAD_REGISTERS, load_b32, uint32_t, 1, WHOLE)
EVERYWHERE(LOAD_REGISTERS, load_b64, uint32_t, 2, WHOLE)
EVERYWHERE(LOAD_REGISTERS, load_b96, uint32_t, 3, WHOLE)
EVERYWHERE(LOAD_REGISTERS, load_b128, uint32_t, 4, WHOLE)
EVERYWHERE(LOAD_REGISTERS, load_d16_u8, uint8_t, 1, LOW)
EVERYWHERE(LOAD_REGISTERS, load_d16_hi_u8, uint8_t, 1, HIGH)
EVERYWHERE(LOAD_REGISTERS, load_d16_i8, int8_t, 1, LOW)
EVERYWHERE(LOAD_REGISTERS, load_d16_hi_i8, int8_t, 1, HIGH)
EVERYWHERE(LOAD_REGISTERS, load_d16_b16, uint16_t, 1, LOW)
EVERYWHERE(LOAD_REGISTERS, load_d16_hi_b16, uint16_t, 1, HIGH)

EVERYWHERE(STORE, store_b8, uint8_t, 1, LOW)
EVERYWHERE(STORE, store_d16_hi_b8, uint8_t, 1, HIGH)
EVERYWHERE(STORE, store_b16, uint16_t, 1, LOW)
EVERYWHERE(STORE, store_d16_hi_b16, uint16_t, 1, HIGH)
EVERYWHERE(STORE, store_b32, uint32_t, 1, WHOLE)
EVERYWHERE(STORE, store_b64, uint32_t, 2, WHOLE)
EVERYWHERE(STORE, store_b96, uint32_t, 3, WHOLE)
EVERYWHERE(STORE, store_b128, uint32_t, 4, WHOLE)

LOAD_REGISTERS(ds_load_u8, reach_lds, uint8_t, 1, WHOLE)
LOAD_REGISTERS(ds_load_i8, reach_lds, int8_t, 1, WHOLE)
LOAD_REGISTERS(ds_load_u16, reach_lds, uint16_t, 1, WHOLE)
LOAD_REGISTERS(ds_load_i16, reach_lds, int16_t, 1, WHOLE)
LOAD_REGISTERS(ds_load_b32, reach_lds, uint32_t, 1, WHOLE)
LOAD_REGISTERS(ds_load_b64, reach_lds, uint32_t, 2, WHOLE)
LOAD_REGISTERS(ds_load_b96, reach_lds, uint32_t, 3, WHOLE)
LOAD_REGISTERS(ds_load_b128, reach_lds, uint32_t, 4, WHOLE)
LOAD_REGISTERS(ds_load_u8_d16, reach_lds, uint8_t, 1, LOW)
LOAD_REGISTERS(ds_load_u8_d16_hi, reach_lds, uint8_t, 1, HIGH)
LOAD_REGISTERS(ds_load_i8_d16, reach_lds, int8_t, 1, LOW)
LOAD_REGISTERS(ds_load_i8_d16_hi, reach_lds, int8_t, 1, HIGH)
LOAD_REGISTERS(ds_load_u16_d16, reach_lds, uint16_t, 1, LOW)
LOAD_REGISTERS(ds_load_u16_d16_hi, reach_lds, uint16_t, 1, HIGH)
STORE(ds_store_b8, reach_lds, uint8_t, 1, LOW)
STORE(ds_store_b8_d16_hi, reach_lds, uint8_t, 1, HIGH)
STORE(ds_store_b16, reach_lds, uint16_t, 1, LOW)
STORE(ds_store_b16_d16_hi, reach_lds, uint16_t, 1, HIGH)
STORE(ds_store_b32, reach_lds, uint32_t, 1, WHOLE)
STORE(ds_store_b64, reach_lds, uint32_t, 2, WHOLE)
STORE(ds_store_b96, reach_lds, uint32_t, 3, WHOLE)
STORE(ds_store_b128, reach_lds, uint32_t, 4, WHOLE)

#define PAIR(suffix, words, stride) \
    INSTRUCTION(ds_load_2addr##suffix) { move_pair(PASSED, words, stride, 1); } \
    INSTRUCTION(ds_store_2addr##suffix) { move_pair(PASSED, words, stride, 0); }
PAIR(_b32, 1, 1)
PAIR(_b64, 2, 1)
PAIR(_stride64_b32, 1, 64)
PAIR(_stride64_b64, 2, 64)

#define ATOMICS(name, type, operands, new) ANYWHERE(ATOMIC, atomic_##name, RETURNS, type, operands, new)
#define ATOMICS_OF_WHOLE(name, letter, kind, operands, new) \
    ATOMICS(name##_##letter##32, kind##32_t, operands, new) \
    ATOMICS(name##_##letter##64, kind##64_t, operands, new)
ATOMICS_OF_WHOLE(swap, b, uint, 1, given)
ATOMICS_OF_WHOLE(cmpswap, b, uint, 2, old == compared ? given : old)
ATOMICS_OF_WHOLE(add, u, uint, 1, old + given)
ATOMICS_OF_WHOLE(sub, u, uint, 1, old - given)
ATOMICS_OF_WHOLE(min, i, int, 1, old < given ? old : given)
ATOMICS_OF_WHOLE(min, u, uint, 1, old < given ? old : given)
ATOMICS_OF_WHOLE(max, i, int, 1, old > given ? old : given)
ATOMICS_OF_WHOLE(max, u, uint, 1, old > given ? old : given)
ATOMICS_OF_WHOLE(and, b, uint, 1, old & given)
ATOMICS_OF_WHOLE(or, b, uint, 1, old | given)
ATOMICS_OF_WHOLE(xor, b, uint, 1, old ^ given)
ATOMICS(add_f32, float, 1, old + given)
#if GFX == 11
ATOMICS(min_f32, float, 1, fminf(old, given))
ATOMICS(max_f32, float, 1, fmaxf(old, given))
#else
ATOMICS(min_num_f32, float, 1, fminf(old, given))
ATOMICS(max_num_f32, float, 1, fmaxf(old, given))
ATOMICS(pk_add_f16, uint32_t, 1, sum_of_halves(old, given, F16))
ATOMICS(pk_add_bf16, uint32_t, 1, sum_of_halves(old, given, BF16))
#endif

/* Caches are not modelled. */
INSTRUCTION(buffer_gl0_inv) { go_on(scalar, NBYTES); }
INSTRUCTION(buffer_gl1_inv) { go_on(scalar, NBYTES); }
INSTRUCTION(global_inv) { go_on(scalar, NBYTES); }
INSTRUCTION(global_wb) { go_on(scalar, NBYTES); }
INSTRUCTION(global_wbinv) { go_on(scalar, NBYTES); }

/* ---------------------------------------------------------------------------------------------------------------------
   Others */

INSTRUCTION(v_nop_e32) { go_on(scalar, 4); }

#if GFX == 12
/* Numbers of 8 bits become longer ones. The short form takes the lowest, the long one has two bits for a byte, of which
   the first is the higher one, or the first for a half. */
static void widen(ARGUMENTS, int count, int exponent_bits, int is_long) {
    (void)memory, (void)lds, (void)scratch, (void)accumulator;
    uint64_t word = word_at(scalar);
    uint32_t source = field(word, is_long ? 32 : 0, 9), shift = 0;
    if (is_long) shift = 16 * field(word, 11, 1) + (count == 1 ? 8 * field(word, 12, 1) : 0);
    widen_bytes(scalar, vector, source, shift, field(word, is_long ? 0 : 17, 8), count, exponent_bits);
    go_on(scalar, is_long ? 8 : 4);
}

WIDEN_ALL
#endif
