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
// Place of the greedy or sampled token in a row of processed logits; -1: no id is allowed, -2: NaN or +inf. names: the
// ids of the places, ascending; null: the places are ids.
int64_t sample_row(const float* logits, int64_t vocab, const TdSample& p, const int32_t* names);

}  // namespace td
