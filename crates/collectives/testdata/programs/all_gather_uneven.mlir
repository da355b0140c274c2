module @all_gather attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<3xbf16>) -> tensor<6xbf16> {
    %0 = "stablehlo.all_gather"(%arg0) {all_gather_dim = 0 : i64, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, use_global_device_ids} : (tensor<3xbf16>) -> tensor<12xbf16>
    %1 = stablehlo.slice %0 [0:2] : (tensor<12xbf16>) -> tensor<2xbf16>
    %2 = stablehlo.slice %0 [6:9] : (tensor<12xbf16>) -> tensor<3xbf16>
    %3 = stablehlo.slice %0 [9:10] : (tensor<12xbf16>) -> tensor<1xbf16>
    %4 = stablehlo.concatenate %1, %2, %3, dim = 0 : (tensor<2xbf16>, tensor<3xbf16>, tensor<1xbf16>) -> tensor<6xbf16>
    return %4 : tensor<6xbf16>
  }
}
