// What Rust calls of C++. Included by the generated bridge: no torch headers here.
#pragma once

#include <cstddef>

namespace tpu_dist::device {

void register_device();
void register_functions(size_t module);

} // namespace tpu_dist::device
