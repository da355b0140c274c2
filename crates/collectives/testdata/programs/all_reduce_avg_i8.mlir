module @all_reduce attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xi8>) -> tensor<6xi8> {
    %0 = "stablehlo.all_reduce"(%arg0) ({
    ^bb0(%a: tensor<i8>, %b: tensor<i8>):
      %c = stablehlo.add %a, %b : tensor<i8>
      stablehlo.return %c : tensor<i8>
    }) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>, use_global_device_ids} : (tensor<6xi8>) -> tensor<6xi8>
    %1 = stablehlo.convert %0 : (tensor<6xi8>) -> tensor<6xi32>
    %2 = stablehlo.constant dense<2> : tensor<6xi32>
    %3 = stablehlo.divide %1, %2 : tensor<6xi32>
    %4 = stablehlo.convert %3 : (tensor<6xi32>) -> tensor<6xi8>
    return %4 : tensor<6xi8>
  }
}
