// Attention over paged KV. K lies as [16 slots per group][head_dim][16], so a score's lane is a position and its sum
// runs over head_dim in order; V lies as [slot][head_dim], so an output's lane is a dimension and its sum runs over
// positions in order. Softmax tiles and splits stand at absolute positions. Nothing here depends on which rows share a
// task: a row's bits are its own. head_dim is a multiple of 16.

// Elements of a cache in an order of lanes that is the type's own; in_order() turns it into the natural one and back.
static inline vf ld_kv(const float* p) { return ld(p); }
static inline vf ld_kv(const uint16_t* p) { return ld_bf16_mixed(p); }
static inline vf ld_kv(const int8_t* p) { return ld_i8(p); }

template <class T>
static inline vf in_order(vf x) {
  return sizeof(T) == 2 ? reorder(x) : x;
}

template <class T>
static inline void fetch(const T* p, int64_t count) {
  for (int64_t i = 0; i < count * (int64_t)sizeof(T); i += 64) __builtin_prefetch((const char*)p + i, 0, 3);
}

// s[r][16 c ..] = scale * (q[r] . k[c]) for R queries and C groups of 16 positions. ahead: null, or per group what to
// fetch meanwhile, as much as is read.
template <int R, int C, class T, bool AHEAD>
static inline void score_rows(const float* const* q, const T* const* k, int64_t dim, float scale, float* const* s,
                              const T* const* ahead) {
  vf acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = set1(0.0f);
  // Unrolled, the compiler would spill sums.
#pragma GCC unroll 1
  for (int64_t d = 0; d < dim; d++) {
    if (AHEAD)
      for (int c = 0; c < C; c++) fetch(ahead[c] + d * 16, 16);
    vf v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) v[c] = ld_kv(k[c] + d * 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      vf x = set1(q[r][d]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = fma(x, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) st(s[r] + c * 16, mul(in_order<T>(acc[r][c]), set1(scale)));
}

// o[r][d .. d + 16 C) += sum over n positions of p[r][i] * v[i][d ..]. SPAN: positions that lie one after another.
template <int R, int C, class T, int SPAN>
static inline void value_columns(float* const* p, const T* const* groups, int64_t n, int64_t dim, int64_t d,
                                 float* const* o, const T* const* ahead) {
  vf acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = in_order<T>(ld(o[r] + d + c * 16));
  for (int64_t g = 0; g * SPAN < n; g++) {
    const T* row = groups[g] + d;
    const T* next = ahead ? ahead[g] : nullptr;
    const int64_t end = n - g * SPAN < SPAN ? n - g * SPAN : SPAN;
#pragma GCC unroll 1
    for (int64_t i = 0; i < end; i++, row += dim) {
      if (next) fetch(next + i * dim + d, C * 16);
      vf v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) v[c] = ld_kv(row + c * 16);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        vf x = set1(p[r][g * SPAN + i]);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = fma(x, v[c], acc[r][c]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) st(o[r] + d + c * 16, in_order<T>(acc[r][c]));
}

// Few queries take two groups (or column blocks) at once: the chains of sums hide each other's latency.
template <int R, class T>
static inline void score_tile(const float* const* q, const T* const* k, int64_t groups, int64_t dim, float scale,
                              float* const* s, const T* const* ahead) {
  constexpr int C = 2 * R <= TD_ROWS_A ? 2 : 1;
  int64_t g = 0;
  for (; g < groups; g += C) {
    float* at[R];
    for (int r = 0; r < R; r++) at[r] = s[r] + g * 16;
    if (g + C <= groups) {
      if (ahead)
        score_rows<R, C, T, true>(q, k + g, dim, scale, at, ahead + g);
      else
        score_rows<R, C, T, false>(q, k + g, dim, scale, at, nullptr);
    } else {
      score_rows<R, 1, T, false>(q, k + g, dim, scale, at, nullptr);
    }
  }
}
template <int R, class T, int SPAN>
static inline void value_tile(float* const* p, const T* const* groups, int64_t n, int64_t dim, float* const* o,
                              const T* const* ahead) {
  constexpr int C = 2 * R <= TD_ROWS_A ? 2 : 1;
  int64_t d = 0;
  for (; d + C * 16 <= dim; d += C * 16) value_columns<R, C, T, SPAN>(p, groups, n, dim, d, o, ahead);
  for (; d < dim; d += 16) value_columns<R, 1, T, SPAN>(p, groups, n, dim, d, o, ahead);
}

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

// Softmax step of one row over a tile: turns scores into weights and rescales the row's sums.
static inline void softmax_row(const TdAttn* a, const Tile* t, float* s, float* o, float greatest) {
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
#pragma GCC unroll 4
  for (int64_t g = 0; g < TD_KV_TILE; g += 16) {
    vf p = vexp2(sub(ld(s + g), set1(m)));
    sum = add(sum, p);
    st(s + g, t->vs ? mul(p, ld(t->vs + g)) : p);
  }
  st(o - TD_HEADER, sum);
}

template <int R, class T>
static inline void score_some(int64_t n, const TdAttn* a, const Tile* t, const T* const* kg, const Rows* rows,
                              const T* const* ahead) {
  if constexpr (R > 0) {
    if (n == R)
      score_tile<R, T>(rows->q, kg, (t->n + 15) >> 4, a->head_dim, a->softcap > 0.0f ? a->scale : a->scale * TD_LOG2E,
                       rows->s, ahead);
    else
      score_some<R - 1, T>(n, a, t, kg, rows, ahead);
  }
}
template <int R, class T, int SPAN>
static inline void value_some(int64_t n, const TdAttn* a, const Tile* t, const T* const* vg, const Rows* rows,
                              const T* const* ahead) {
  if constexpr (R > 0) {
    if (n == R)
      value_tile<R, T, SPAN>(rows->s, vg, t->n, a->head_dim, rows->o, ahead);
    else
      value_some<R - 1, T, SPAN>(n, a, t, vg, rows, ahead);
  }
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
  for (int64_t g = 0; g * 16 < n; g++) {
    float* k = room + g * 16 * dim;
    float* v = room + (TD_KV_TILE + g * 16) * dim;
    int64_t have = n - g * 16 < 16 ? n - g * 16 : 16;
    for (int64_t d = 0; d < dim; d++) st(k + d * 16, in_order<T>(ld_kv(kg[g] + d * 16)));
    for (int64_t i = 0; i < have * dim; i += 16) st(v + i, in_order<T>(ld_kv(vg[g] + i)));
    kf[g] = k;
    vf_[g] = v;
  }
}

// One tile for all queries of a task: scores, then softmax, then values, so that K and V each pass the L1 cache once.
// next: null, or per group the K that will be read after this tile.
template <class T, int SPAN>
static inline void task_tile(const TdAttn* a, const Tile* whole, const T* const* kg, const T* const* vg, float* sums,
                             float* scores, const T* const* next) {
  const int64_t dim = a->head_dim, G = a->group, nq = (a->row1 - a->row0) * G, stride = dim + TD_HEADER;
  for (int pass = 0; pass < 2; pass++)
    for (int64_t i = 0; i < nq; i += TD_ROWS_A) {
      int64_t have = nq - i < TD_ROWS_A ? nq - i : TD_ROWS_A;
      int64_t reach = a->first_pos + (i + have - 1) / G;
      if (reach < whole->pos) continue;
      Tile t = *whole;
      if (reach - t.pos + 1 < t.n) t.n = reach - t.pos + 1;
      Rows rows;
      for (int64_t r = 0; r < have; r++) {
        int64_t row = (i + r) / G, head = a->head * G + (i + r) % G;
        rows.q[r] = a->q + (a->row0 + row) * a->ldq + head * dim;
        rows.s[r] = scores + (i + r) * TD_KV_TILE;
        rows.o[r] = sums + (i + r) * stride + TD_HEADER;
      }
      if (pass) {
        value_some<TD_ROWS_A, T, SPAN>(have, a, &t, vg, &rows, i ? nullptr : next);
        continue;
      }
      score_some<TD_ROWS_A, T>(have, a, &t, kg, &rows, next && !i ? vg : nullptr);
      for (int64_t r = 0; r < have; r++) {
        int64_t last = a->first_pos + (i + r) / G;
        mask_row(a, &t, rows.s[r], &rows.top[r], a->window > 0 ? last - a->window + 1 : 0, last);
      }
      for (int64_t r = 0; r < have; r++) softmax_row(a, &t, rows.s[r], rows.o[r], rows.top[r]);
    }
}

// K of the tile that follows `pos` in this task, or of the next task; null where nothing is known to follow.
template <class T>
static inline bool next_keys(const TdAttn* a, int64_t pos, int64_t last_pos, const T** kg) {
  const int64_t bs = a->block_size;
  const int32_t *table = a->table;
  int64_t n = last_pos + 1 - (pos + TD_KV_TILE), head = a->head, first = pos + TD_KV_TILE;
  if (n <= 0) {
    table = a->next_table;
    if (!table) return false;
    n = a->next_n;
    head = a->next_head;
    first = a->next_pos;
  }
  for (int64_t g = 0; g < TD_KV_TILE / 16; g++) {
    int64_t p = first + g * 16;
    kg[g] = nullptr;
    if (g * 16 < n) kg[g] = (const T*)a->k_cache + (((int64_t)table[p / bs] * a->kv_heads + head) * bs + p % bs) * a->head_dim;
  }
  return true;
}

template <class T>
static void attention_typed(const TdAttn* a) {
  const int64_t dim = a->head_dim, G = a->group, nq = (a->row1 - a->row0) * G, stride = dim + TD_HEADER;
  float* room = a->scratch;                   // fp32 tile
  float* sums = room + 2 * TD_KV_TILE * dim;  // per query: header, acc
  float* totals = sums + nq * stride;
  float* scores = totals + nq * stride;  // [nq][TD_KV_TILE]
  const bool wide = sizeof(T) < 4 && nq > 2 * TD_ROWS_A;
  const int64_t last_pos = a->first_pos + (a->row1 - a->row0) - 1;
  const int64_t lowest = a->window > 0 && a->first_pos >= a->window ? a->first_pos - a->window + 1 : 0;
  float ks[TD_KV_TILE], vs[TD_KV_TILE];
  for (int64_t i = 0; i < nq; i++) clear_row(totals + i * stride + TD_HEADER, dim);
  for (int64_t split = a->split0; split < a->split1; split++) {
    int64_t p0 = split * TD_KV_SPLIT, p1 = p0 + TD_KV_SPLIT;
    if (p1 > last_pos + 1) p1 = last_pos + 1;
    for (int64_t i = 0; i < nq; i++) clear_row(sums + i * stride + TD_HEADER, dim);
    for (int64_t pos = p0; pos < p1; pos += TD_KV_TILE) {
      if (pos + TD_KV_TILE <= lowest) continue;
      int64_t n = p1 - pos < TD_KV_TILE ? p1 - pos : TD_KV_TILE;
      const T *kg[TD_KV_TILE / 16], *vg[TD_KV_TILE / 16], *next[TD_KV_TILE / 16];
      gather_tile<T>(a, pos, n, kg, vg, ks, vs);
      Tile t = {pos, n, sizeof(T) == 1 ? ks : nullptr, sizeof(T) == 1 ? vs : nullptr};
      // Blocks lie scattered: the hardware's prefetcher can't know the next one.
      bool follows = next_keys<T>(a, pos, a->split1 * TD_KV_SPLIT <= last_pos ? a->split1 * TD_KV_SPLIT - 1 : last_pos, next);
      if (wide) {
        const float *kf[TD_KV_TILE / 16], *vw[TD_KV_TILE / 16];
        widen_tile<T>(n, dim, kg, vg, room, kf, vw);
        task_tile<float, TD_KV_TILE>(a, &t, kf, vw, sums, scores, nullptr);
      } else {
        task_tile<T, 16>(a, &t, kg, vg, sums, scores, follows ? next : nullptr);
      }
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
