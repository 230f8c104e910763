// Times between two CUDA events.
#pragma once

#include <c10/core/Device.h>

#include <functional>

namespace flash_dist::debug {

void synchronize(c10::Device device);

// Median in milliseconds over runs runs, after a few that are not counted.
double median_ms(const std::function<void()>& work, int runs, c10::Device device);

}  // namespace flash_dist::debug
