// ISA selection, the process's pool, and small entry points used by tests.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "runtime.h"

extern "C" const TdKernels* td_table_generic();
extern "C" const TdKernels* td_table_avx2();
extern "C" const TdKernels* td_table_avx512();
extern "C" const TdKernels* td_table_avx512bf16();

namespace td {
namespace {

const TdKernels* g_kernels = nullptr;
std::shared_ptr<Pool> g_pool;
std::mutex g_mutex;

bool runs(const char* name) {
  if (!std::strcmp(name, "generic")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!std::strcmp(name, "avx2")) return avx2 && td_table_avx2();
#if defined(TD_EMULATED_AVX512)
  return true;
#else
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vnni");
  if (!std::strcmp(name, "avx512")) return avx512 && td_table_avx512();
  if (!std::strcmp(name, "avx512bf16"))
    return avx512 && __builtin_cpu_supports("avx512bf16") && td_table_avx512bf16();
#endif
#endif
  return false;
}

const TdKernels* table(const char* name) {
  if (!runs(name)) return nullptr;
  if (!std::strcmp(name, "generic")) return td_table_generic();
  if (!std::strcmp(name, "avx2")) return td_table_avx2();
  if (!std::strcmp(name, "avx512")) return td_table_avx512();
  if (!std::strcmp(name, "avx512bf16")) return td_table_avx512bf16();
  return nullptr;
}

const char* const kBestFirst[] = {"avx512bf16", "avx512", "avx2", "generic"};

}  // namespace

const TdKernels* kernels() {
  if (!g_kernels)
    for (const char* name : kBestFirst)
      if ((g_kernels = table(name))) break;
  return g_kernels;
}

std::shared_ptr<Pool> pool() {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (!g_pool) g_pool = std::make_shared<Pool>(1);
  return g_pool;
}

}  // namespace td

TD_API int32_t td_abi_version() { return TD_ABI_VERSION; }
TD_API const char* td_isa() { return td::kernels()->name; }
TD_API int32_t td_isa_runs(const char* name) { return td::runs(name) ? 1 : 0; }

// Decoders made before keep theirs.
TD_API int32_t td_select_isa(const char* name) {
  const TdKernels* t = td::table(name);
  if (!t) return -1;
  td::g_kernels = t;
  return 0;
}

TD_API int32_t td_set_threads(int32_t n) {
  std::lock_guard<std::mutex> lock(td::g_mutex);
  if (!td::g_pool || td::g_pool->size() != n) td::g_pool = std::make_shared<td::Pool>(n);
  return td::g_pool->size();
}

TD_API int32_t td_threads() { return td::pool()->size(); }

// out[M][n] = x[M][k] . w + bias, through the pool; buffers of `act` are the caller's. For tests and measurements.
TD_API void td_linear(const TdWeight* w, const TdAct* act, const float* x, int64_t rows, float* out, int64_t ldo,
                      const float* bias) {
  struct Job {
    const TdWeight* w;
    const TdAct* act;
    const float* x;
    int64_t rows;
    float* out;
    int64_t ldo;
    const float* bias;
    std::shared_ptr<td::Pool> pool;
  } job = {w, act, x, rows, out, ldo, bias, td::pool()};
  job.pool->run(
      [](void* c, int thread) {
        auto* j = static_cast<Job*>(c);
        const TdKernels* K = td::kernels();
        int32_t need = td::activation_need(j->w->kind);
        j->pool->phase(thread, j->rows, 4, [&](int64_t a, int64_t b) {
          for (int64_t m = a; m < b; m++) K->prepare(j->x + m * j->w->k, j->w->k, need, j->act, m);
        });
        j->pool->phase(thread, (j->w->n + 15) / 16, 2, [&](int64_t a, int64_t b) {
          K->linear(j->w, a, b, j->act, 0, j->rows, j->out, j->ldo, j->bias, 0, 1.0f);
        });
      },
      &job);
}

TD_API void td_rmsnorm(const float* x, const float* w, float eps, int64_t n, float* out) {
  td::kernels()->rmsnorm(x, w, eps, n, out);
}
TD_API void td_rope(float* x, const float* cos, const float* sin, int64_t rotary_dim) {
  td::kernels()->rope(x, cos, sin, rotary_dim);
}
TD_API void td_gated(float* gate, const float* up, int64_t n, int32_t activation) {
  td::kernels()->gated(gate, up, n, activation);
}
TD_API void td_attention(const TdAttn* a) { td::kernels()->attention(a); }
TD_API void td_merge(const float* parts, int64_t n, int64_t stride, int64_t dim, float* out) {
  td::kernels()->merge(parts, n, stride, dim, out);
}
TD_API int64_t td_attention_scratch(int64_t head_dim, int64_t group) { return TD_ATTN_SCRATCH(head_dim, group); }
TD_API void td_unpack_row(const TdWeight* w, int64_t row, float* out) { td::unpack_row(*w, row, out); }
TD_API int64_t td_column_bytes(int32_t kind, int64_t k) { return td::column_bytes(kind, k); }
