// Kernels for one instruction set; see build.py for its flags. Nothing but C headers: an inline library function
// compiled here could become everyone's copy.
#include "tandem_cpu.h"

#if defined(TD_EMULATED_AVX512) || (defined(__AVX512BF16__) && defined(__AVX512VNNI__))
#if defined(TD_EMULATED_AVX512)
#include "simde/x86/avx512.h"
#else
#include <immintrin.h>
#endif
#define TD_NS tdk_avx512bf16
#define TD_NAME "avx512bf16"
#define TD_HAS_BF16 1

namespace {
namespace TD_NS {
#include "simd_avx512.inl"

#include "rows.inl"

#include "attention.inl"
#include "linear.inl"
#include "sampling.inl"
#include "table.inl"
}  // namespace TD_NS
}  // namespace

extern "C" const TdKernels* td_table_avx512bf16() { return &TD_NS::kTable; }
#else
extern "C" const TdKernels* td_table_avx512bf16() { return 0; }
#endif
