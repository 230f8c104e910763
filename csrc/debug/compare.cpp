#include "compare.h"

#include <limits>
#include <sstream>

namespace flash_dist::debug {

namespace {

// flags: not all false.
std::string describe_first(const std::string& name, const at::Tensor& flags,
                           const at::Tensor& value, const at::Tensor& expected) {
  const int64_t flat = flags.flatten().nonzero()[0].item<int64_t>();
  std::vector<int64_t> coordinates;
  int64_t rest = flat;
  for (int64_t axis = flags.dim() - 1; axis >= 0; --axis) {
    coordinates.insert(coordinates.begin(), rest % flags.size(axis));
    rest /= flags.size(axis);
  }
  const auto at_first = [&](const at::Tensor& t) {
    return t.flatten()[flat].to(at::kDouble).item<double>();
  };
  std::ostringstream text;
  text.precision(9);
  text << name << "[";
  for (size_t axis = 0; axis < coordinates.size(); ++axis)
    text << (axis == 0 ? "" : ", ") << coordinates[axis];
  text << "] is " << at_first(value) << ", should be " << at_first(expected);
  return text.str();
}

at::Tensor bits(const at::Tensor& t) {
  return t.contiguous().view(t.element_size() == 2 ? at::kShort : at::kInt);
}

}  // namespace

Difference compare(const std::string& name, const at::Tensor& value, const at::Tensor& expected,
                   double tolerance) {
  const at::Tensor exact = expected.to(value.device());
  const at::Tensor got = value.to(at::kDouble);
  // Equal infinities are no error; a NaN, or an infinity on one side, is an infinite one.
  const at::Tensor error = got.sub(exact)
                               .abs()
                               .masked_fill(got.eq(exact), 0)
                               .nan_to_num(std::numeric_limits<double>::infinity(),
                                           std::numeric_limits<double>::infinity());
  const at::Tensor finite = exact.masked_fill(exact.isfinite().logical_not(), 0);

  Difference difference;
  difference.max_error = error.max().item<double>();
  difference.relative = error.norm().item<double>() / finite.norm().item<double>();
  difference.tolerance = tolerance * finite.abs().max().item<double>();
  const at::Tensor beyond = error.gt(difference.tolerance);
  difference.beyond = beyond.sum().item<int64_t>();
  if (difference.beyond > 0) difference.first = describe_first(name, beyond, value, exact);
  return difference;
}

std::string compare_bits(const std::string& name, const at::Tensor& value,
                         const at::Tensor& expected) {
  const at::Tensor differ = bits(value).ne(bits(expected));
  const int64_t count = differ.sum().item<int64_t>();
  if (count == 0) return "";
  return std::to_string(count) + " of " + std::to_string(differ.numel()) +
         " elements: " + describe_first(name, differ, value, expected);
}

}  // namespace flash_dist::debug
