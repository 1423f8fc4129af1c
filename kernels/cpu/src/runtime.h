// What the ISA-independent units share.
#pragma once
#include <memory>

#include "pool.h"
#include "tandem_cpu.h"

namespace td {

const TdKernels* kernels();  // of the selected ISA
std::shared_ptr<Pool> pool();  // the process's pool; one that was replaced lives as long as its decoders

int64_t column_bytes(int32_t kind, int64_t k);
int32_t activation_need(int32_t kind);
// Writes one row of a packed weight as fp32 (embedding lookup).
void unpack_row(const TdWeight& w, int64_t row, float* out);

}  // namespace td
