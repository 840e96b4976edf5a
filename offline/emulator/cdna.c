/* Instructions of CDNA: see instructions.h. */
#include "instructions.h"

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
   Memory and LDS */

static uint32_t *data_of(uint64_t word, int at, int lane, uint32_t *vector, uint32_t *accumulator) {
    return (word >> 55 & 1 ? accumulator : vector) + field(word, at, 8) * LANES + lane;
}

static int reach_buffer(REACH) {
    uint64_t word = access->word = word_at(scalar);
    access->given = access->returned = data_of(word, 40, lane, vector, accumulator);
    access->offset = field(word, 0, 12), access->nbytes = 8;
    uint32_t offset = word >> 12 & 1 ? vector[field(word, 32, 8) * LANES + lane] : 0;
    offset += access->offset;
    return reach_by_descriptor(access, lane, scalar, memory, field(word, 48, 5) * 4, offset, scalar[word >> 56]);
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
    access->at = (uint8_t *)((uint64_t)memory + at + access->offset), access->left = UINT64_MAX, access->nbytes = 8;
    return is_active(scalar, lane);
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
    uint32_t shift = select < 4 ? 8 * select : select == 5 ? 16 : 0;
    widen_bytes(scalar, vector, source, shift, field(word, is_long ? 0 : 17, 8), count, exponent_bits);
    go_on(scalar, is_sdwa || is_long ? 8 : 4);
}

WIDEN_ALL

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
