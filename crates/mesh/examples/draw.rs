//! Draws a mesh on a slice: `draw v5p:4x4x8 dp=8,tp=16 [out.svg]`.

use tpu_dist_mesh::{MultiSlice, assign, draw::Drawing};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let job: MultiSlice = arguments.next().ok_or("a topology")?.parse()?;
    let Some(mesh) = arguments.next() else {
        print!("{}", Drawing::slice(&job).text());
        return Ok(());
    };
    let mut names = Vec::new();
    let mut shape = Vec::new();
    for axis in mesh.split(',') {
        let (name, size) = axis.split_once('=').ok_or("axes as dp=8,tp=16")?;
        names.push(name.to_owned());
        shape.push(size.parse()?);
    }
    let traffic = {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assign::default_traffic(&names)
    };
    let placement = assign::place(&job, &shape, None, &traffic)?;
    let drawing = Drawing::mesh(&job, &placement, &names);
    print!("{}", drawing.text());
    if let Some(path) = arguments.next() {
        std::fs::write(path, drawing.svg())?;
    }
    Ok(())
}
