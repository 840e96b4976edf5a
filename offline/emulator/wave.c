/* Runs the waves of a workgroup. An instruction is a function that tinygrad or clang compiled; it moves the program
   counter itself. */
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

/* As in machine.py. */
enum { REGISTERS = 256, PROGRAM_COUNTER = 256, MOST_WAVES = 32 };
enum { SIGNALS = 1, WAITS = 2 }; /* parts of a barrier, which are one instruction or two */
enum outcome { ENDED, NOT_COMPILED, FAULT, LANES_DISAGREE, DROPPED, ENDLESS, BESIDE_LDS, BESIDE_SCRATCH };

/* nbytes at an address, between spare bytes from `begin` on and up to a multiple of 16, all filled with `byte`. */
struct memory {
    uint8_t *begin, *address;
    uint64_t nbytes;
    uint8_t byte;
};

struct instruction {
    void (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
    uint8_t buffers[6]; /* which of the wave's buffers are its arguments; too many do no harm */
    uint8_t barrier;
};

struct wave {
    uint64_t buffers[6]; /* as tinygrad numbers them: scalar and vector registers, memory, LDS, scratch, accumulation */
    struct memory *scratch;
    uint8_t saturates, flushes; /* what MODE says of FP8 that is too large, and of subnormal fp32 */
    uint32_t signals;           /* to how many barriers it has come */
};

struct workgroup {
    const struct instruction *program; /* an entry for each 4 bytes of the code */
    uint64_t begin, nbytes;            /* of the code */
    const uint32_t *scalar;            /* with which each wave starts */
    struct memory *lds;
    struct wave *waves[MOST_WAVES];
    int32_t n_waves, lanes;
    int32_t wave_number;       /* the scalar register that has it from bit 25 on, -1 if there is none */
    int32_t current, turn;     /* a wave, and how many instructions it still executes before another one is chosen */
    uint64_t running, waiting; /* a bit for each wave; those that wait are at a barrier */
    int64_t left;              /* instructions, until the workgroup is taken not to end */
    uint64_t random;
    uint64_t fault; /* the address that was touched last without permission */
    uint8_t poison, flushes;
};

static const int32_t turns[] = {1, 7, 40, 300};

/* ---------------------------------------------------------------------------------------------------------------------
   Memory */

static uint8_t *end_of(const struct memory *memory) { return memory->address + (memory->nbytes + 15) / 16 * 16; }

void fill(struct memory *memory, uint8_t byte) {
    memory->byte = byte;
    memset(memory->begin, byte, end_of(memory) - memory->begin);
}

static int differs(const uint8_t *begin, const uint8_t *end, uint8_t byte) {
    uint8_t bits = 0;
    for (; begin < end; begin++) bits |= *begin ^ byte;
    return bits != 0;
}

static int is_overrun(const struct memory *memory) {
    return differs(memory->begin, memory->address, memory->byte) ||
           differs(memory->address + memory->nbytes, end_of(memory), memory->byte);
}

static sigjmp_buf before_fault;
static volatile uint64_t fault_address;

/* Ends the instruction, and run() with an outcome that is not ENDED. */
void fault_at(uint64_t address, int outcome) {
    fault_address = address;
    siglongjmp(before_fault, outcome);
}

static void on_fault(int signal, siginfo_t *info, void *context) { fault_at((uint64_t)info->si_addr, FAULT); }

/* ---------------------------------------------------------------------------------------------------------------------
   Arithmetic: the control register of this processor, and its bits to take subnormal numbers as 0. */

#if defined(__aarch64__)
enum { FLUSHES = 1 << 24 };
static uint64_t get_control(void) { return __builtin_aarch64_get_fpcr(); }
static void set_control(uint64_t value) { __builtin_aarch64_set_fpcr(value); }
#elif defined(__SSE__)
enum { FLUSHES = 0x8040 };
static uint64_t get_control(void) { return _mm_getcsr(); }
static void set_control(uint64_t value) { _mm_setcsr(value); }
#else
enum { FLUSHES = 0 };
static uint64_t get_control(void) { return 0; }
static void set_control(uint64_t value) { (void)value; }
#endif

/* ---------------------------------------------------------------------------------------------------------------------
   Waves */

/* Sets LDS and all registers of the waves as the hardware does, or to the poison. */
void start(struct workgroup *group) {
    fill(group->lds, group->poison);
    for (int index = 0; index < group->n_waves; index++) {
        struct wave *wave = group->waves[index];
        uint32_t *vector = (uint32_t *)wave->buffers[1];
        uint32_t *scalar = (uint32_t *)wave->buffers[0];
        memcpy(scalar, group->scalar, SCALARS * sizeof(uint32_t));
        if (group->wave_number >= 0) scalar[group->wave_number] = index << 25;
        memset(vector, group->poison, REGISTERS * group->lanes * sizeof(uint32_t));
        memset((void *)wave->buffers[5], group->poison, REGISTERS * group->lanes * sizeof(uint32_t));
        for (int lane = 0; lane < group->lanes; lane++) vector[lane] = group->lanes * index + lane;
        fill(wave->scratch, group->poison);
        wave->buffers[3] = (uint64_t)group->lds->address;
        wave->buffers[4] = (uint64_t)wave->scratch->address;
        wave->saturates = 0, wave->flushes = group->flushes, wave->signals = 0;
    }
    group->running = UINT64_MAX >> (64 - group->n_waves);
    group->waiting = group->turn = 0;
}

static uint32_t random_below(struct workgroup *group, uint32_t n) { /* a linear congruential generator */
    group->random = group->random * 6364136223846793005u + 1442695040888963407u;
    return (group->random >> 32) % n;
}

/* Lets the waves go on that wait at a barrier to which all have come that have not ended. */
static void release(struct workgroup *group) {
    uint32_t least = UINT32_MAX;
    for (int index = 0; index < group->n_waves; index++)
        if ((group->running | group->waiting) >> index & 1 && group->waves[index]->signals < least)
            least = group->waves[index]->signals;
    for (int index = 0; index < group->n_waves; index++)
        if (group->waiting >> index & 1 && group->waves[index]->signals <= least) {
            group->waiting &= ~(1ull << index);
            group->running |= 1ull << index;
        }
}

/* Ends the turn of the current wave, which has ended or waits at a barrier. */
static void stop(struct workgroup *group, int waits) {
    uint64_t current = 1ull << group->current;
    group->running &= ~current;
    group->waiting |= waits ? current : 0;
    group->turn = 0;
    release(group);
}

/* Gives a turn to one of the waves that run. */
static void choose(struct workgroup *group) {
    uint64_t others = group->running;
    for (int skipped = random_below(group, __builtin_popcountll(others)); skipped; skipped--) others &= others - 1;
    group->current = __builtin_ctzll(others);
    group->turn = turns[random_below(group, sizeof turns / sizeof *turns)];
    group->left -= group->turn;
}

static enum outcome run_waves(struct workgroup *group, uint64_t control) {
    while (group->running) {
        if (!group->turn) choose(group);
        if (group->left < 0) return ENDLESS;
        struct wave *wave = group->waves[group->current];
        const uint64_t *buffers = wave->buffers;
        const uint32_t *scalar = (uint32_t *)buffers[0];
        set_control(wave->flushes ? control | FLUSHES : control & ~(uint64_t)FLUSHES);
        while (group->turn) {
            uint64_t program_counter = scalar[PROGRAM_COUNTER] | (uint64_t)scalar[PROGRAM_COUNTER + 1] << 32;
            uint64_t offset = program_counter - group->begin;
            if (program_counter == UINT64_MAX) {
                stop(group, 0);
                break;
            }
            if (offset >= group->nbytes || !group->program[offset / 4].function) return NOT_COMPILED;
            const struct instruction *next = &group->program[offset / 4];
            const uint8_t *b = next->buffers;
            group->turn--;
            next->function(buffers[b[0]], buffers[b[1]], buffers[b[2]], buffers[b[3]], buffers[b[4]], buffers[b[5]]);
            if (next->barrier) {
                wave->signals += next->barrier & SIGNALS;
                if (next->barrier & WAITS) stop(group, 1);
                else release(group);
            }
        }
    }
    if (is_overrun(group->lds)) return BESIDE_LDS;
    for (int index = 0; index < group->n_waves; index++)
        if (is_overrun(group->waves[index]->scratch)) return BESIDE_SCRATCH;
    return ENDED;
}

/* Runs the waves of a workgroup in a random order until all have ended, or the current one cannot go on. */
int run(struct workgroup *group) {
    const uint64_t control = get_control();
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER}, before[2];
    enum outcome outcome;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
    outcome = sigsetjmp(before_fault, 0);
    if (outcome) group->fault = fault_address;
    else outcome = run_waves(group, control);
    set_control(control);
    sigaction(SIGSEGV, &before[0], 0);
    sigaction(SIGBUS, &before[1], 0);
    return outcome;
}
