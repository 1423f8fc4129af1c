// Kernels for one instruction set; see build.py for its flags. Nothing but C headers: an inline library function
// compiled here could become everyone's copy.
#include "tandem_cpu.h"

#if 1

#define TD_NS tdk_generic
#define TD_NAME "generic"
#define TD_HAS_BF16 0

namespace {
namespace TD_NS {
#include "simd_generic.inl"

#include "rows.inl"

#include "attention.inl"
#include "linear.inl"
#include "sampling.inl"
#include "table.inl"
}  // namespace TD_NS
}  // namespace

extern "C" const TdKernels* td_table_generic() { return &TD_NS::kTable; }
#else
extern "C" const TdKernels* td_table_generic() { return 0; }
#endif
