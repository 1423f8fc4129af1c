// Attention over paged KV, in softmax tiles and splits that stand at absolute positions. Nothing here depends on which
// rows share a task: a row's bits are its own. head_dim is a multiple of 16.
#include "attention_products.inl"

struct Tile {
  int64_t pos, n;  // first absolute position; valid positions, 1 to TD_KV_TILE
  const float* ks;   // int8 scales of the tile's positions, gathered; null otherwise
  const float* vs;
};

struct Rows {
  const float* q[TD_ROWS_A];
  float* s[TD_ROWS_A];
  float* o[TD_ROWS_A];  // running sums of this split, see TD_HEADER
  float top[TD_ROWS_A];
};

// What lies before a query's sums: lanes of its sum of weights (16), ..., the maximum so far (-2), and, once a split is
// done, the sum of weights (-1). Scores and maxima are in units of log 2.
#define TD_HEADER 32
#define TD_LOG2E 1.44269504088896341f

// Hides what a row does not see, and finds its greatest score of the tile.
static inline void mask_row(const TdAttn* a, const Tile* t, float* s, float* greatest, int64_t first, int64_t last) {
  const vf minus = set1(-__builtin_inff());
  vf top = minus;
  if (first <= t->pos && last >= t->pos + TD_KV_TILE - 1 && !t->ks && !(a->softcap > 0.0f)) {
#pragma GCC unroll 4
    for (int64_t g = 0; g < TD_KV_TILE; g += 16) top = vmax(top, ld(s + g));
    *greatest = hmax(top);
    return;
  }
  for (int64_t g = 0; g < TD_KV_TILE; g += 16) {
    int64_t lo = first - (t->pos + g), hi = last - (t->pos + g);
    uint32_t bits16 = 0xffff;
    if (hi < 0 || lo > 15) {
      bits16 = 0;
    } else {
      if (hi < 15) bits16 &= (2u << hi) - 1;
      if (lo > 0) bits16 &= ~((1u << lo) - 1);
    }
    if (!bits16) {
      st(s + g, minus);
      continue;
    }
    vf x = ld(s + g);
    if (t->ks) x = mul(x, ld(t->ks + g));
    if (a->softcap > 0.0f) x = mul(set1(a->softcap * TD_LOG2E), vtanh(div(x, set1(a->softcap))));
    if (bits16 != 0xffff) x = sel(mask_of(bits16), x, minus);
    st(s + g, x);
    top = vmax(top, x);
  }
  *greatest = hmax(top);
}

// Softmax step of one row over a tile: turns scores into weights (dot: as bf16) and rescales the row's sums.
static inline void softmax_row(const TdAttn* a, const Tile* t, float* s, float* o, float greatest, bool dot) {
  const float old = o[-2], m = greatest > old ? greatest : old;
  if (m == -__builtin_inff()) {
    for (int64_t g = 0; g < TD_KV_TILE; g += 16) st(s + g, set1(0.0f));
    return;
  }
  vf sum = ld(o - TD_HEADER);
  if (m != old) {
    float c[16];
    st(c, vexp2(set1(old - m)));
    sum = mul(sum, set1(c[0]));
    for (int64_t d = 0; d < a->head_dim; d += 16) st(o + d, mul(ld(o + d), set1(c[0])));
    o[-2] = m;
  }
#if TD_DOT_ATTENTION
  if (dot) {
    // Each 32 weights take the place of 16 scores that were read before. The sum is of the rounded weights.
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
#pragma GCC unroll 2
    for (int64_t g = 0; g < TD_KV_TILE; g += 32) {
      vf lo = vexp2_rough(sub(ld(s + g), set1(m))), hi = vexp2_rough(sub(ld(s + g + 16), set1(m)));
      __m512bh p = _mm512_cvtne2ps_pbh(hi.v, lo.v);
      sum.v = _mm512_dpbf16_ps(sum.v, p, ones);
      _mm512_storeu_si512(s + g / 2, (__m512i)p);
    }
    st(o - TD_HEADER, sum);
    return;
  }
#endif
#pragma GCC unroll 4
  for (int64_t g = 0; g < TD_KV_TILE; g += 16) {
    vf p = vexp2(sub(ld(s + g), set1(m)));
    sum = add(sum, p);
    st(s + g, t->vs ? mul(p, ld(t->vs + g)) : p);
  }
  st(o - TD_HEADER, sum);
}

// Folds one split's sums (m, l, acc) into the running ones, in split order.
static inline void merge_into(float* total, const float* part, int64_t dim) {
  float ma = total[-2], mb = part[-2];
  if (mb == -__builtin_inff()) return;
  float m = ma > mb ? ma : mb, c[16];
  st(c, vexp2(set1(ma - m)));
  float ca = c[0];
  st(c, vexp2(set1(mb - m)));
  float cb = c[0];
  for (int64_t d = 0; d < dim; d += 16) {
    vf x = mul(ld(total + d), set1(ca));
    st(total + d, fma(ld(part + d), set1(cb), x));
  }
  total[-1] = __builtin_fmaf(part[-1], cb, total[-1] * ca);
  total[-2] = m;
}

static inline void clear_row(float* o, int64_t dim) {
  st(o - TD_HEADER, set1(0.0f));
  o[-2] = -__builtin_inff();
  o[-1] = 0.0f;
  for (int64_t d = 0; d < dim; d += 16) st(o + d, set1(0.0f));
}

static inline void finish_row(const float* o, int64_t dim, float* out) {
  float scale = o[-1] > 0.0f ? 1.0f / o[-1] : 0.0f;
  for (int64_t d = 0; d < dim; d += 16) st(out + d, mul(ld(o + d), set1(scale)));
}

// Merges partial results laid out part[i * stride] = (m, l, acc...) and writes the row's output.
static void merge(const float* parts, int64_t n_parts, int64_t stride, int64_t dim, float* out) {
  float total[TD_HEADER + 512];
  clear_row(total + TD_HEADER, dim);
  for (int64_t i = 0; i < n_parts; i++) merge_into(total + TD_HEADER, parts + i * stride + 2, dim);
  finish_row(total + TD_HEADER, dim, out);
}

template <class T>
static void gather_tile(const TdAttn* a, int64_t pos, int64_t n, const T** kg, const T** vg, float* ks, float* vs) {
  const int64_t bs = a->block_size, dim = a->head_dim;
  for (int64_t g = 0; g * 16 < n; g++) {
    int64_t p = pos + g * 16;
    int64_t unit = (int64_t)a->table[p / bs] * a->kv_heads + a->head;
    int64_t slot = p % bs;
    kg[g] = (const T*)a->k_cache + (unit * bs + slot) * dim;
    vg[g] = (const T*)a->v_cache + (unit * bs + slot) * dim;
    if (sizeof(T) == 1) {
      int64_t have = n - g * 16 < 16 ? n - g * 16 : 16;
      for (int64_t i = 0; i < 16; i++) {
        ks[g * 16 + i] = i < have ? a->k_scale[unit * bs + slot + i] : 0.0f;
        vs[g * 16 + i] = i < have ? a->v_scale[unit * bs + slot + i] : 0.0f;
      }
    }
  }
}

// Converts a tile to fp32 once when many rows will read it; the conversion is exact, so bits do not change.
template <class T>
static void widen_tile(int64_t n, int64_t dim, const T** kg, const T** vg, float* room, const float** kf,
                       const float** vf_) {
  const int64_t STEP = Products<T>::STEP;
  for (int64_t g = 0; g * 16 < n; g++) {
    float* k = room + g * 16 * dim;
    float* v = room + (TD_KV_TILE + g * 16) * dim;
    int64_t have = n - g * 16 < 16 ? n - g * 16 : 16;
    for (int64_t d = 0; d < dim; d += STEP)
      for (int64_t half = 0; half < STEP; half++) st(k + (d + half) * 16, ld_half(kg[g] + d * 16, half));
    for (int64_t i = 0; i < have; i++)
      for (int64_t d = 0; d < dim; d += 16) st(v + i * dim + d, ld_half(vg[g] + i / STEP * STEP * dim + d * STEP, i % STEP));
    kf[g] = k;
    vf_[g] = v;
  }
}

// What the queries of a task are multiplied as, and where their scores and sums lie.
struct Queries {
  const void* q;  // if DOT, bf16 [nq][head_dim]
  float* sums;    // per query: header, sums
  float* scores;  // [nq][TD_KV_TILE]
};

// The K and V that will be read after a tile, to be fetched meanwhile.
template <class T>
struct Next {
  const T *k[TD_KV_TILE / 16], *v[TD_KV_TILE / 16];
  int64_t groups;  // 0: not known
};

// Scores and weights of queries i .. i + have, or their values, for the tile's positions that the last of them sees.
template <class T, int SPAN>
static inline void tile_pass(const TdAttn* a, const Tile* t, const T* const* kg, const T* const* vg, const Queries* of,
                             int64_t i, int64_t have, bool values, const Next<T>* next) {
  const int64_t dim = a->head_dim, G = a->group, groups = (t->n + 15) >> 4;
  const bool dot = Products<T>::DOT;
  Rows rows;
  for (int64_t r = 0; r < have; r++) {
    int64_t row = (i + r) / G, head = a->head * G + (i + r) % G;
    rows.q[r] = dot ? (const float*)((const uint16_t*)of->q + (i + r) * dim) : a->q + (a->row0 + row) * a->ldq + head * dim;
    rows.s[r] = of->scores + (i + r) * TD_KV_TILE;
    rows.o[r] = of->sums + (i + r) * (dim + TD_HEADER) + TD_HEADER;
  }
  const T* const* ahead = i || !next || !next->groups ? nullptr : values ? next->v : next->k;
  if (ahead)
    for (int64_t g = groups; g < next->groups; g++) fetch(ahead[g], 16 * dim);
  if (values) {
    value_some<TD_ROWS_A, T, SPAN>(have, rows.s, vg, t->n, dim, rows.o, ahead);
    return;
  }
  const float scale = a->softcap > 0.0f ? a->scale : a->scale * TD_LOG2E;
  score_some<TD_ROWS_A, T>(have, rows.q, kg, groups, dim, scale, rows.s, ahead);
  for (int64_t r = 0; r < have; r++) {
    int64_t last = a->first_pos + (i + r) / G;
    mask_row(a, t, rows.s[r], &rows.top[r], a->window > 0 ? last - a->window + 1 : 0, last);
  }
  for (int64_t r = 0; r < have; r++) softmax_row(a, t, rows.s[r], rows.o[r], rows.top[r], dot);
}

// One tile for all queries of a task. In fp32, K and V each pass the L1 cache once: all scores, then all values. In
// bf16 both stay there, and few queries at a time keep their scores there too.
template <class T, int SPAN>
static inline void task_tile(const TdAttn* a, const Tile* whole, const T* const* kg, const T* const* vg,
                             const Queries* of, const Next<T>* next) {
  const int64_t G = a->group, nq = (a->row1 - a->row0) * G;
  const int passes = Products<T>::DOT ? 1 : 2;
  for (int pass = 0; pass < passes; pass++)
    for (int64_t i = 0; i < nq; i += TD_ROWS_A) {
      int64_t have = nq - i < TD_ROWS_A ? nq - i : TD_ROWS_A;
      int64_t reach = a->first_pos + (i + have - 1) / G;
      if (reach < whole->pos) continue;
      Tile t = *whole;
      if (reach - t.pos + 1 < t.n) t.n = reach - t.pos + 1;
      tile_pass<T, SPAN>(a, &t, kg, vg, of, i, have, pass == 1, next);
      if (passes == 1) tile_pass<T, SPAN>(a, &t, kg, vg, of, i, have, true, next);
    }
}

#if TD_DOT_ATTENTION
// The task's queries as bf16, with the scale of scores in them.
static inline void round_queries(const TdAttn* a, uint16_t* out) {
  const int64_t dim = a->head_dim, G = a->group, nq = (a->row1 - a->row0) * G;
  const __m512 scale = _mm512_set1_ps(a->softcap > 0.0f ? a->scale : a->scale * TD_LOG2E);
  for (int64_t i = 0; i < nq; i++) {
    const float* q = a->q + (a->row0 + i / G) * a->ldq + (a->head * G + i % G) * dim;
    for (int64_t d = 0; d < dim; d += 16)
      _mm256_storeu_si256((__m256i*)(out + i * dim + d), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(q + d), scale)));
  }
}
#endif

// What follows the tile at `pos`: the next one before `end`, or the next task's first. Blocks lie scattered, so the
// hardware's prefetcher can't know.
template <class T>
static inline Next<T> next_tile(const TdAttn* a, int64_t pos, int64_t end) {
  const int64_t bs = a->block_size;
  int64_t head = a->head;
  const int32_t* table = a->table;
  Next<T> next;
  next.groups = 0;
  pos += TD_KV_TILE;
  if (pos >= end) {
    table = a->next_table;
    if (!table) return next;
    pos = a->next_pos;
    end = pos + a->next_n;
    head = a->next_head;
  }
  const int64_t n = end - pos < TD_KV_TILE ? end - pos : TD_KV_TILE;
  next.groups = (n + 15) / 16;
  for (int64_t g = 0; g < TD_KV_TILE / 16; g++) {
    // Where there is less, the last group again, which costs nothing.
    int64_t p = pos + (g < next.groups ? g : next.groups - 1) * 16;
    int64_t at = (((int64_t)table[p / bs] * a->kv_heads + head) * bs + p % bs) * a->head_dim;
    next.k[g] = (const T*)a->k_cache + at;
    next.v[g] = (const T*)a->v_cache + at;
  }
  return next;
}

template <class T>
static inline void attend_tile(const TdAttn* a, const Queries* of, int64_t pos, int64_t n, int64_t end, float* room) {
  const bool wide = sizeof(T) < 4 && !Products<T>::DOT && (a->row1 - a->row0) * a->group > 2 * TD_ROWS_A;
  const T *kg[TD_KV_TILE / 16], *vg[TD_KV_TILE / 16];
  float ks[TD_KV_TILE], vs[TD_KV_TILE];
  gather_tile<T>(a, pos, n, kg, vg, ks, vs);
  Tile t = {pos, n, sizeof(T) == 1 ? ks : nullptr, sizeof(T) == 1 ? vs : nullptr};
  if (wide) {
    const float *kf[TD_KV_TILE / 16], *vw[TD_KV_TILE / 16];
    widen_tile<T>(n, a->head_dim, kg, vg, room, kf, vw);
    task_tile<float, TD_KV_TILE>(a, &t, kf, vw, of, nullptr);
  } else {
    Next<T> next = next_tile<T>(a, pos, end);
    task_tile<T, 16>(a, &t, kg, vg, of, &next);
  }
}

template <class T>
static void attention_typed(const TdAttn* a) {
  const int64_t dim = a->head_dim, G = a->group, nq = (a->row1 - a->row0) * G, stride = dim + TD_HEADER;
  float* room = a->scratch;  // a tile in fp32
  float* sums = room + 2 * TD_KV_TILE * dim;
  float* totals = sums + nq * stride;
  float* scores = totals + nq * stride;
  uint16_t* rounded = (uint16_t*)(scores + nq * TD_KV_TILE);  // queries in bf16
  const Queries of = {rounded, sums, scores};
#if TD_DOT_ATTENTION
  if (Products<T>::DOT) round_queries(a, rounded);
#endif
  const int64_t last_pos = a->first_pos + (a->row1 - a->row0) - 1;
  const int64_t lowest = a->window > 0 && a->first_pos >= a->window ? a->first_pos - a->window + 1 : 0;
  const int64_t end = a->split1 * TD_KV_SPLIT <= last_pos ? a->split1 * TD_KV_SPLIT : last_pos + 1;
  for (int64_t i = 0; i < nq; i++) clear_row(totals + i * stride + TD_HEADER, dim);
  for (int64_t split = a->split0; split < a->split1; split++) {
    int64_t p0 = split * TD_KV_SPLIT, p1 = p0 + TD_KV_SPLIT;
    if (p1 > end) p1 = end;
    for (int64_t i = 0; i < nq; i++) clear_row(sums + i * stride + TD_HEADER, dim);
    for (int64_t pos = p0; pos < p1; pos += TD_KV_TILE) {
      if (pos + TD_KV_TILE <= lowest) continue;
      attend_tile<T>(a, &of, pos, p1 - pos < TD_KV_TILE ? p1 - pos : TD_KV_TILE, end, room);
    }
    for (int64_t i = 0; i < nq; i++) {
      float* o = sums + i * stride + TD_HEADER;
      o[-1] = hsum(ld(o - TD_HEADER));
      merge_into(totals + i * stride + TD_HEADER, o, dim);
    }
  }
  for (int64_t i = 0; i < nq; i++) {
    const float* o = totals + i * stride + TD_HEADER;
    if (a->part) {
      float* p = a->part + i * (dim + 2);
      for (int64_t d = -2; d < dim; d++) p[2 + d] = o[d];
    } else {
      finish_row(o, dim, a->out + (a->row0 + i / G) * a->ldo + (a->head * G + i % G) * dim);
    }
  }
}

static void attention(const TdAttn* a) {
  if (a->kv_type == TD_KV_F32)
    attention_typed<float>(a);
  else if (a->kv_type == TD_KV_BF16)
    attention_typed<uint16_t>(a);
  else
    attention_typed<int8_t>(a);
}
