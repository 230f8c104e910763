// Addresses inside the strided views of params.h.
#pragma once

#include "core/params.h"

namespace flash_dist {

// Element 0 of row 0 of query head head_kv * group + head_in_group; k and v have head_in_group 0 only.
template <class Element = uint16_t>
__device__ __forceinline__ Element* head_begin(const View& view, int batch, int head_kv,
                                               int head_in_group) {
  return static_cast<Element*>(view.data) + batch * view.batch + head_kv * view.head_kv +
         head_in_group * view.head_group;
}

}  // namespace flash_dist
