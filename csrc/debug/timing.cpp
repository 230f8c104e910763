#include "timing.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <vector>

namespace flash_dist::debug {

namespace {

constexpr int WARM_UP = 3;

c10::Event record(c10::Stream stream) {
  c10::Event event(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);  // it takes times
  event.record(stream);
  return event;
}

}  // namespace

void synchronize(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

double median_ms(const std::function<void()>& work, int runs, c10::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  for (int i = 0; i < WARM_UP; ++i) work();
  std::vector<std::pair<c10::Event, c10::Event>> events;
  for (int i = 0; i < runs; ++i) {
    c10::Event begin = record(stream);
    work();
    events.emplace_back(std::move(begin), record(stream));
  }
  synchronize(device);
  std::vector<double> times;
  for (const auto& [begin, end] : events) times.push_back(begin.elapsedTime(end));
  std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
  return times[runs / 2];
}

}  // namespace flash_dist::debug
