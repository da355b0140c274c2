module @all_reduce attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xf64>) -> tensor<6xf64> {
    %0 = "stablehlo.all_gather"(%arg0) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<6xf64>) -> tensor<12xf64>
    %1 = stablehlo.slice %0 [0:6] : (tensor<12xf64>) -> tensor<6xf64>
    %2 = stablehlo.slice %0 [6:12] : (tensor<12xf64>) -> tensor<6xf64>
    %3 = stablehlo.maximum %1, %2 : tensor<6xf64>
    return %3 : tensor<6xf64>
  }
}
