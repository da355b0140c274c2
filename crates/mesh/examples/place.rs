//! Prints placements as JSON, for comparison with other planners.
//!
//! Reads requests from standard input, one JSON object a line: `{"topology": "v5p:4x4x8",
//! "shape": [8, 16], "traffic": [[0, "all_reduce", 1e6]], "dcn_shape": [1, 1] or null,
//! "order": [device ids] or null}`. With an order it evaluates that order, otherwise it
//! places the mesh. Answers one JSON object a line: a placement with `device_ids`.

use std::io::{self, BufRead, Write};

use serde_json::{Value, json};
use tpu_dist_mesh::{
    MultiSlice,
    assign::{self, Traffic},
};

fn answer(request: &Value) -> Result<Value, Box<dyn std::error::Error>> {
    let job: MultiSlice = request["topology"].as_str().ok_or("topology")?.parse()?;
    let sizes = |value: &Value| serde_json::from_value::<Option<Vec<u32>>>(value.clone());
    let shape = sizes(&request["shape"])?.ok_or("shape")?;
    let traffic: Vec<(usize, String, f64)> = serde_json::from_value(request["traffic"].clone())?;
    let traffic = traffic
        .into_iter()
        .map(|(axis, collective, bytes)| {
            Ok(Traffic {
                axis,
                collective: collective.parse()?,
                bytes,
            })
        })
        .collect::<Result<Vec<_>, tpu_dist_mesh::Error>>()?;
    let placement = match sizes(&request["order"])? {
        None => assign::place(
            &job,
            &shape,
            sizes(&request["dcn_shape"])?.as_deref(),
            &traffic,
        )?,
        Some(ids) => {
            let devices = job.devices();
            let ranks = ids
                .iter()
                .map(|&id| {
                    devices
                        .iter()
                        .position(|d| d.id == id)
                        .map(|rank| rank as u32)
                })
                .collect::<Option<Vec<_>>>()
                .ok_or("order: no such device id")?;
            assign::evaluate(&job, &shape, &ranks, &traffic)?
        }
    };
    let mut value = serde_json::to_value(&placement)?;
    value["device_ids"] = json!(placement.device_ids(&job));
    Ok(value)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for line in io::stdin().lock().lines() {
        let value = answer(&serde_json::from_str(&line?)?)
            .unwrap_or_else(|error| json!({ "error": error.to_string() }));
        writeln!(io::stdout(), "{value}")?;
    }
    Ok(())
}
