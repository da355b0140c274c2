module @scatter attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6xi8>, %arg1: tensor<i32>, %arg2: tensor<i32>) -> tensor<3xi8> {
    %0 = stablehlo.constant dense<0> : tensor<i8>
    %1 = stablehlo.slice %arg0 [0:2] : (tensor<6xi8>) -> tensor<2xi8>
    %2 = stablehlo.pad %1, %0, low = [0], high = [1], interior = [0] : (tensor<2xi8>, tensor<i8>) -> tensor<3xi8>
    %3 = stablehlo.slice %arg0 [2:2] : (tensor<6xi8>) -> tensor<0xi8>
    %4 = stablehlo.pad %3, %0, low = [0], high = [3], interior = [0] : (tensor<0xi8>, tensor<i8>) -> tensor<3xi8>
    %5 = stablehlo.slice %arg0 [2:5] : (tensor<6xi8>) -> tensor<3xi8>
    %6 = stablehlo.slice %arg0 [5:6] : (tensor<6xi8>) -> tensor<1xi8>
    %7 = stablehlo.pad %6, %0, low = [0], high = [2], interior = [0] : (tensor<1xi8>, tensor<i8>) -> tensor<3xi8>
    %8 = stablehlo.concatenate %2, %4, %5, %7, dim = 0 : (tensor<3xi8>, tensor<3xi8>, tensor<3xi8>, tensor<3xi8>) -> tensor<12xi8>
    %9 = "stablehlo.all_to_all"(%8) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, concat_dimension = 0 : i64, replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>, split_count = 4 : i64, split_dimension = 0 : i64} : (tensor<12xi8>) -> tensor<12xi8>
    %10 = stablehlo.constant dense<3> : tensor<i32>
    %11 = stablehlo.multiply %arg1, %10 : tensor<i32>
    %12 = stablehlo.dynamic_slice %9, %11, sizes = [3] : (tensor<12xi8>, tensor<i32>) -> tensor<3xi8>
    return %12 : tensor<3xi8>
  }
}
