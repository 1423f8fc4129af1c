// From rows of processed logits to one token each, and log-softmax scores of rows: no sort of a vocabulary anywhere.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime.h"

namespace td {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// Room that a thread reuses from call to call.
struct Room {
  std::vector<float> scaled;
  std::vector<int32_t> ids;
};

Room& room(int64_t vocab) {
  thread_local Room r;
  if (static_cast<int64_t>(r.ids.size()) < vocab) {
    r.scaled.resize(static_cast<size_t>(vocab));
    r.ids.resize(static_cast<size_t>(vocab));
  }
  return r;
}

// Sorts ids by value, ties by the lowest id; only the first `count` need to be in order.
void order(const float* x, int32_t* ids, int64_t have, int64_t count) {
  auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  if (count < have)
    std::partial_sort(ids, ids + count, ids + have, before);
  else
    std::sort(ids, ids + have, before);
}

// ids of the `count` greatest of x, in order. Widens a margin under the greatest until enough values are in it.
int64_t greatest(const float* x, int64_t vocab, float top, int64_t count, int32_t* ids) {
  const TdKernels* K = kernels();
  count = std::min(count, vocab);
  for (float margin = 4.0f;; margin *= 2.0f) {
    bool all = margin > 512.0f;
    int64_t have = K->find_from(x, vocab, all ? kNever : top - margin, ids, vocab);
    if (have < count && !all) continue;
    order(x, ids, have, count);
    return std::min(have, count);
  }
}

// The head of the distribution that top-p keeps, ids in order of value. floor: what min-p keeps.
int64_t nucleus(const float* x, int64_t vocab, float top, float floor, float top_p, int32_t* ids) {
  const TdKernels* K = kernels();
  const double target = static_cast<double>(top_p) * K->expsum(x, vocab, top, floor);
  for (float margin = 4.0f;; margin *= 2.0f) {
    float least = std::max(top - margin, floor);
    bool all = margin > 512.0f || least == floor;
    int64_t have = K->find_from(x, vocab, all ? floor : least, ids, vocab);
    double mass = 0.0;
    for (int64_t i = 0; i < have; i++) mass += std::exp(static_cast<double>(x[ids[i]] - top));
    if (mass < target && !all) continue;
    order(x, ids, have, have);
    double before = 0.0;
    int64_t kept = 0;
    while (kept < have && (kept == 0 || before < target) && x[ids[kept]] > kNever)
      before += static_cast<double>(std::exp(x[ids[kept++]] - top));
    return kept;
  }
}

// min-p, then top-k, then top-p on what is left of it; returns how many ids survive, in ids.
int64_t truncate(const float* x, int64_t vocab, float top, float floor, const TdSample& p, int32_t* ids) {
  if (p.top_k <= 0 || p.top_k >= vocab) return nucleus(x, vocab, top, floor, p.top_p, ids);
  int64_t have = greatest(x, vocab, top, p.top_k, ids);
  double total = 0.0;
  int64_t kept = 0;
  while (kept < have && x[ids[kept]] >= floor && x[ids[kept]] > kNever)
    total += static_cast<double>(std::exp(x[ids[kept++]] - top));
  if (p.top_p >= 1.0f) return kept;
  const double target = static_cast<double>(p.top_p) * total;
  double before = 0.0;
  for (int64_t i = 0; i < kept; i++) {
    if (i && !(before < target)) return i;
    before += static_cast<double>(std::exp(x[ids[i]] - top));
  }
  return kept;
}

}  // namespace

int64_t sample_row(const float* logits, int64_t vocab, const TdSample& p, const int32_t* names) {
  const TdKernels* K = kernels();
  int64_t first = K->argmax(logits, vocab);
  if (first < 0 || p.temperature == 0.0f) return first;
  Room& r = room(vocab);
  const float top = logits[first] / p.temperature;
  if (!(std::fabs(top) < std::numeric_limits<float>::infinity())) return -2;
  const float floor = std::min(p.min_p > 0.0f ? top + std::log(p.min_p) : kNever, top);
  bool cut = (p.top_k > 0 && p.top_k < vocab) || p.top_p < 1.0f;
  if (!cut) return K->argmax_noise(logits, vocab, first, p.temperature, floor, names, r.ids.data(), &p);
  float* x = r.scaled.data();
  K->divide(logits, vocab, p.temperature, x);
  int64_t kept = truncate(x, vocab, top, floor, p, r.ids.data());
  return K->argmax_noise_of(x, r.ids.data(), kept, names, &p);
}

}  // namespace td

// One id per row of logits [rows][stride]: the greedy or sampled token; -1: no id is allowed, -2: NaN or +inf.
TD_API void td_sample(const float* logits, int64_t stride, int64_t vocab, int64_t rows, const TdSample* params,
                      int32_t* ids) {
  if (rows == 1) {
    // Waking the pool takes longer than one row.
    ids[0] = static_cast<int32_t>(td::sample_row(logits, vocab, params[0], nullptr));
    return;
  }
  struct Job {
    const float* logits;
    int64_t stride, vocab, rows;
    const TdSample* params;
    int32_t* ids;
    std::shared_ptr<td::Pool> pool;
  } job = {logits, stride, vocab, rows, params, ids, td::pool()};
  job.pool->run(
      [](void* c, int thread) {
        auto* j = static_cast<Job*>(c);
        j->pool->phase(thread, j->rows, 1, [&](int64_t a, int64_t b) {
          for (int64_t r = a; r < b; r++)
            j->ids[r] = static_cast<int32_t>(td::sample_row(j->logits + r * j->stride, j->vocab, j->params[r], nullptr));
        });
      },
      &job);
}

// Log-softmax scores of one id per row: logprob, rank from 1, and the counts[r] most likely ids with theirs, at
// top_ids[r * width]. Rows are numbers into logits.
TD_API void td_score(const float* logits, int64_t stride, int64_t vocab, int64_t n, const int32_t* rows,
                     const int32_t* ids, const int32_t* counts, int64_t width, float* logprobs, int32_t* ranks,
                     int32_t* top_ids, float* top_logprobs) {
  struct Job {
    const float* logits;
    int64_t stride, vocab, n;
    const int32_t *rows, *ids, *counts;
    int64_t width;
    float* logprobs;
    int32_t *ranks, *top_ids;
    float* top_logprobs;
    std::shared_ptr<td::Pool> pool;
  } job = {logits, stride, vocab, n, rows, ids, counts, width, logprobs, ranks, top_ids, top_logprobs, td::pool()};
  job.pool->run(
      [](void* c, int thread) {
        auto* j = static_cast<Job*>(c);
        const TdKernels* K = td::kernels();
        j->pool->phase(thread, j->n, 1, [&](int64_t a, int64_t b) {
          for (int64_t i = a; i < b; i++) {
            const float* x = j->logits + j->rows[i] * j->stride;
            int64_t first = K->argmax(x, j->vocab);
            float top = first < 0 ? 0.0f : x[first];
            double norm = static_cast<double>(top) + std::log(K->expsum(x, j->vocab, top, td::kNever));
            j->logprobs[i] = static_cast<float>(static_cast<double>(x[j->ids[i]]) - norm);
            j->ranks[i] = static_cast<int32_t>(K->count_greater(x, j->vocab, x[j->ids[i]]) + 1);
            if (j->counts[i] <= 0) continue;
            td::Room& r = td::room(j->vocab);
            int64_t have = td::greatest(x, j->vocab, top, j->counts[i], r.ids.data());
            for (int64_t t = 0; t < have; t++) {
              j->top_ids[i * j->width + t] = r.ids[static_cast<size_t>(t)];
              j->top_logprobs[i * j->width + t] =
                  static_cast<float>(static_cast<double>(x[r.ids[static_cast<size_t>(t)]]) - norm);
            }
          }
        });
      },
      &job);
}

// Noise of ids 0 .. n-1 as the filter (fp32) and as the decision (fp64, rounded) use it. For tests.
TD_API void td_noise(const TdSample* p, int64_t n, float* fast, float* exact) {
  td::kernels()->noise(p, n, fast, exact);
}
