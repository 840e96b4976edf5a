/* Runs one wave. An instruction is a function that tinygrad compiled; it moves the program counter itself. */
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

/* As in machine.py. */
enum { TURN_IS_OVER, ENDED, AT_BARRIER, NOT_COMPILED, FAULT, LANES_DISAGREE, DROPPED };

struct instruction {
    void (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
    uint8_t buffers[6]; /* which of the wave's buffers are its arguments; too many do no harm */
    uint8_t is_barrier;
};

static sigjmp_buf before_fault;
static volatile uint64_t fault_address;

/* Ends the instruction, and run_wave() with the outcome. */
void fault_at(uint64_t address, int outcome) {
    fault_address = address;
    siglongjmp(before_fault, outcome);
}

static void on_fault(int signal, siginfo_t *info, void *context) { fault_at((uint64_t)info->si_addr, FAULT); }

uint64_t last_fault(void) { return fault_address; }

/* The control register of this processor's floating-point arithmetic, and its bits to take subnormal numbers as 0. */
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

/* Runs at most *turn instructions of a program of `size` bytes at `begin`, and leaves there how many are left; program has
   an entry for each 4 bytes. flushes: fp32 instructions take subnormal numbers as 0. */
int run_wave(struct instruction *program, uint64_t begin, uint64_t size, const uint64_t *buffers,
             volatile uint64_t *program_counter, volatile long *turn, int flushes) {
    const uint64_t control = get_control();
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER}, before[2];
    volatile int outcome = TURN_IS_OVER;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
    set_control(flushes ? control | FLUSHES : control & ~(uint64_t)FLUSHES);
    int fault = sigsetjmp(before_fault, 1);
    if (fault) {
        outcome = fault;
    } else {
        while (outcome == TURN_IS_OVER && *turn > 0) {
            uint64_t offset = *program_counter - begin;
            if (*program_counter == UINT64_MAX) {
                outcome = ENDED;
            } else if (offset >= size || !program[offset / 4].function) {
                outcome = NOT_COMPILED;
            } else {
                struct instruction *next = &program[offset / 4];
                --*turn;
                const uint8_t *b = next->buffers;
                next->function(buffers[b[0]], buffers[b[1]], buffers[b[2]], buffers[b[3]], buffers[b[4]], buffers[b[5]]);
                if (next->is_barrier) outcome = AT_BARRIER;
            }
        }
    }
    set_control(control);
    sigaction(SIGSEGV, &before[0], 0);
    sigaction(SIGBUS, &before[1], 0);
    return outcome;
}
