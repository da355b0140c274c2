module @broadcast attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xbf16>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<6xbf16> {
    %0 = stablehlo.bitcast_convert %arg0 : (tensor<6xbf16>) -> tensor<6xui16>
    %1 = stablehlo.compare EQ, %arg1, %arg2 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %2 = stablehlo.constant dense<0> : tensor<6xui16>
    %3 = stablehlo.select %1, %0, %2 : tensor<i1>, tensor<6xui16>
    %4 = "stablehlo.all_reduce"(%3) ({
    ^bb0(%a: tensor<ui16>, %b: tensor<ui16>):
      %c = stablehlo.add %a, %b : tensor<ui16>
      stablehlo.return %c : tensor<ui16>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<6xui16>) -> tensor<6xui16>
    %5 = stablehlo.bitcast_convert %4 : (tensor<6xui16>) -> tensor<6xbf16>
    return %5 : tensor<6xbf16>
  }
}
