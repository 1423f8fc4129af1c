// Computes one linear layer, norm and gate from a file of inputs, for a library that another architecture runs.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tandem_cpu.h"

extern "C" {
int32_t td_select_isa(const char*);
int32_t td_set_threads(int32_t);
void td_linear(const TdWeight*, const TdAct*, const float*, int64_t, float*, int64_t, const float*);
void td_rmsnorm(const float*, const float*, float, int64_t, float*);
void td_gated(float*, const float*, int64_t, int32_t);
}

// argv: level, inputs, outputs. Inputs: int64 kind, n, k, rows, bytes; tiles; x fp32 [rows][k].
int main(int argc, char** argv) {
  if (argc != 4 || td_select_isa(argv[1])) return 2;
  FILE* in = std::fopen(argv[2], "rb");
  int64_t head[5];
  if (!in || std::fread(head, 8, 5, in) != 5) return 3;
  const int64_t kind = head[0], n = head[1], k = head[2], rows = head[3], bytes = head[4];
  auto* tiles = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64)));
  std::vector<float> x(static_cast<size_t>(rows * k)), f(x.size()), out(static_cast<size_t>(rows * n)), normed(x.size());
  if (std::fread(tiles, 1, static_cast<size_t>(bytes), in) != static_cast<size_t>(bytes)) return 3;
  if (std::fread(x.data(), 4, x.size(), in) != x.size()) return 3;
  std::fclose(in);
  std::vector<int8_t> q(x.size());
  std::vector<TdXBlock> b(x.size() / 32);
  std::vector<uint16_t> h(x.size());
  TdWeight w = {tiles, n, k, static_cast<int32_t>(kind), 0};
  TdAct act = {f.data(), q.data(), b.data(), h.data(), k};
  td_set_threads(2);
  td_linear(&w, &act, x.data(), rows, out.data(), n, nullptr);
  for (int64_t r = 0; r < rows; r++) td_rmsnorm(x.data() + r * k, x.data(), 1e-5f, k, normed.data() + r * k);
  std::vector<float> gated(x);
  for (int64_t r = 0; r < rows; r++) td_gated(gated.data() + r * k, x.data() + r * k, k, 0);
  FILE* to = std::fopen(argv[3], "wb");
  if (!to) return 4;
  std::fwrite(out.data(), 4, out.size(), to);
  std::fwrite(normed.data(), 4, normed.size(), to);
  std::fwrite(gated.data(), 4, gated.size(), to);
  return std::fclose(to);
}
