module @broadcast attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xf64>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<6xf64> {
    %0 = "stablehlo.all_gather"(%arg0) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<6xf64>) -> tensor<12xf64>
    %1 = stablehlo.constant dense<6> : tensor<i32>
    %2 = stablehlo.multiply %arg1, %1 : tensor<i32>
    %3 = stablehlo.dynamic_slice %0, %2, sizes = [6] : (tensor<12xf64>, tensor<i32>) -> tensor<6xf64>
    return %3 : tensor<6xf64>
  }
}
