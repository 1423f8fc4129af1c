// Attention over paged KV. K lies as [16 slots per group][head_dim][16], so a score's lane is a position and its sum
// runs over head_dim in order; V lies as [slot][head_dim], so an output's lane is a dimension and its sum runs over
// positions in order. Softmax tiles and splits stand at absolute positions. Nothing here depends on which rows share a
// task: a row's bits are its own. head_dim is a multiple of 16.

static inline vf ld_kv(const float* p) { return ld(p); }
static inline vf ld_kv(const uint16_t* p) { return ld_bf16(p); }
static inline vf ld_kv(const int8_t* p) { return ld_i8(p); }

// s[r][0..15] = q[r] . k
template <int R, class T>
static inline void score_rows(const float* const* q, const T* k, int64_t dim, float scale, float* const* s, int64_t at) {
  vf acc[R];
  for (int r = 0; r < R; r++) acc[r] = set1(0.0f);
  for (int64_t d = 0; d < dim; d++, k += 16) {
    vf v = ld_kv(k);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = fma(set1(q[r][d]), v, acc[r]);
  }
  for (int r = 0; r < R; r++) st(s[r] + at, mul(acc[r], set1(scale)));
}

// o[r][d..d+15] += sum over n positions of p[r][i] * v[i][d..]
template <int R, class T>
static inline void value_rows(float* const* p, const T* const* groups, int64_t n, int64_t dim, float* const* o) {
  for (int64_t d = 0; d < dim; d += 16) {
    vf acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = ld(o[r] + d);
    for (int64_t i = 0; i < n; i++) {
      vf v = ld_kv(groups[i >> 4] + (i & 15) * dim + d);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) acc[r] = fma(set1(p[r][i]), v, acc[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) st(o[r] + d, acc[r]);
  }
}

struct Tile {
  int64_t pos, n;  // first absolute position; valid positions, 1 to TD_KV_TILE
  const float* ks;   // int8 scales of the tile's positions, gathered; null otherwise
  const float* vs;
};

struct Rows {
  const float* q[TD_ROWS_A];
  float* s[TD_ROWS_A];
  float* o[TD_ROWS_A];  // running sums of this split; o[-2] = max, o[-1] = sum of weights
  int64_t last[TD_ROWS_A];   // last visible position
  int64_t first[TD_ROWS_A];  // first visible position
};

// Softmax step of one row over a tile: turns scores into weights and rescales the row's sums.
static inline void softmax_row(const TdAttn* a, const Tile* t, float* s, float* o, int64_t first, int64_t last) {
  const vf minus = set1(-__builtin_inff());
  vf top = minus;
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
    if (a->softcap > 0.0f) x = mul(set1(a->softcap), vtanh(div(x, set1(a->softcap))));
    if (bits16 != 0xffff) x = sel(mask_of(bits16), x, minus);
    st(s + g, x);
    top = vmax(top, x);
  }
  float old = o[-2], m = hmax(top);
  if (!(m > old)) m = old;
  if (m == -__builtin_inff()) {
    for (int64_t g = 0; g < TD_KV_TILE; g += 16) st(s + g, set1(0.0f));
    return;
  }
  vf sum = set1(0.0f);
  for (int64_t g = 0; g < TD_KV_TILE; g += 16) {
    vf p = vexp(sub(ld(s + g), set1(m)));
    sum = add(sum, p);
    st(s + g, t->vs ? mul(p, ld(t->vs + g)) : p);
  }
  float total = hsum(sum);
  if (m != old) {
    float c[16];
    st(c, vexp(set1(old - m)));
    o[-1] = o[-1] * c[0];
    for (int64_t d = 0; d < a->head_dim; d += 16) st(o + d, mul(ld(o + d), set1(c[0])));
    o[-2] = m;
  }
  o[-1] = o[-1] + total;
}

template <int R, class T>
static inline void tile_step(const TdAttn* a, const Tile* t, const T* const* kg, const T* const* vg, const Rows* rows) {
  int64_t groups = (t->n + 15) >> 4;
  for (int64_t g = 0; g < groups; g++) score_rows<R, T>(rows->q, kg[g], a->head_dim, a->scale, rows->s, g * 16);
  for (int r = 0; r < R; r++) softmax_row(a, t, rows->s[r], rows->o[r], rows->first[r], rows->last[r]);
  value_rows<R, T>(rows->s, vg, t->n, a->head_dim, rows->o);
}

template <int R, class T>
static inline void tile_some(int64_t n, const TdAttn* a, const Tile* t, const T* const* kg, const T* const* vg,
                             const Rows* rows) {
  if constexpr (R > 0) {
    if (n == R)
      tile_step<R, T>(a, t, kg, vg, rows);
    else
      tile_some<R - 1, T>(n, a, t, kg, vg, rows);
  }
}

// Folds one split's sums (m, l, acc) into the running ones, in split order.
static inline void merge_into(float* total, const float* part, int64_t dim) {
  float ma = total[-2], mb = part[-2];
  if (mb == -__builtin_inff()) return;
  float m = ma > mb ? ma : mb, c[16];
  st(c, vexp(set1(ma - m)));
  float ca = c[0];
  st(c, vexp(set1(mb - m)));
  float cb = c[0];
  for (int64_t d = 0; d < dim; d += 16) {
    vf x = mul(ld(total + d), set1(ca));
    st(total + d, fma(ld(part + d), set1(cb), x));
  }
  total[-1] = __builtin_fmaf(part[-1], cb, total[-1] * ca);
  total[-2] = m;
}

static inline void clear_row(float* o, int64_t dim) {
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
  float total[2 + 512];
  clear_row(total + 2, dim);
  for (int64_t i = 0; i < n_parts; i++) merge_into(total + 2, parts + i * stride + 2, dim);
  finish_row(total + 2, dim, out);
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
    for (int64_t d = 0; d < dim; d++) st(k + d * 16, ld_kv(kg[g] + d * 16));
    for (int64_t i = 0; i < have * dim; i += 16) st(v + i, ld_kv(vg[g] + i));
    kf[g] = k;
    vf_[g] = v;
  }
}

template <class T>
static void attention_typed(const TdAttn* a) {
  const int64_t dim = a->head_dim, G = a->group, nq = (a->row1 - a->row0) * G, stride = dim + 16;
  float* room = a->scratch;                        // fp32 tile
  float* sums = room + 2 * TD_KV_TILE * dim;       // per query: 14 unused, m, l, acc
  float* totals = sums + nq * stride;
  float* scores = totals + nq * stride;            // [TD_ROWS_A][TD_KV_TILE]
  const bool wide = sizeof(T) < 4 && nq > 2 * TD_ROWS_A;
  const int64_t last_pos = a->first_pos + (a->row1 - a->row0) - 1;
  const int64_t lowest = a->window > 0 && a->first_pos >= a->window ? a->first_pos - a->window + 1 : 0;
  float ks[TD_KV_TILE], vs[TD_KV_TILE];
  for (int64_t i = 0; i < nq; i++) clear_row(totals + i * stride + 16, dim);
  for (int64_t split = a->split0; split < a->split1; split++) {
    int64_t p0 = split * TD_KV_SPLIT, p1 = p0 + TD_KV_SPLIT;
    if (p1 > last_pos + 1) p1 = last_pos + 1;
    for (int64_t i = 0; i < nq; i++) clear_row(sums + i * stride + 16, dim);
    for (int64_t pos = p0; pos < p1; pos += TD_KV_TILE) {
      if (pos + TD_KV_TILE <= lowest) continue;
      int64_t n = p1 - pos < TD_KV_TILE ? p1 - pos : TD_KV_TILE;
      const T *kg[TD_KV_TILE / 16], *vg[TD_KV_TILE / 16];
      const float *kf[TD_KV_TILE / 16], *vw[TD_KV_TILE / 16];
      gather_tile<T>(a, pos, n, kg, vg, ks, vs);
      if (wide) widen_tile<T>(n, dim, kg, vg, room, kf, vw);
      for (int64_t i = 0; i < nq; i += TD_ROWS_A) {
        int64_t have = nq - i < TD_ROWS_A ? nq - i : TD_ROWS_A;
        Rows rows;
        int64_t reach = -1;
        for (int64_t r = 0; r < have; r++) {
          int64_t row = (i + r) / G, head = a->head * G + (i + r) % G;
          rows.q[r] = a->q + (a->row0 + row) * a->ldq + head * dim;
          rows.s[r] = scores + r * TD_KV_TILE;
          rows.o[r] = sums + (i + r) * stride + 16;
          rows.last[r] = a->first_pos + row;
          rows.first[r] = a->window > 0 ? rows.last[r] - a->window + 1 : 0;
          if (rows.last[r] > reach) reach = rows.last[r];
        }
        if (reach < pos) continue;
        int64_t seen = reach - pos + 1 < n ? reach - pos + 1 : n;
        Tile t = {pos, seen, sizeof(T) == 1 ? ks : nullptr, sizeof(T) == 1 ? vs : nullptr};
        if (wide)
          tile_some<TD_ROWS_A, float>(have, a, &t, kf, vw, &rows);
        else
          tile_some<TD_ROWS_A, T>(have, a, &t, kg, vg, &rows);
      }
    }
    for (int64_t i = 0; i < nq; i++) merge_into(totals + i * stride + 16, sums + i * stride + 16, dim);
  }
  for (int64_t i = 0; i < nq; i++) {
    const float* o = totals + i * stride + 16;
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
