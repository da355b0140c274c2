//! Pictures of a slice and of a mesh on it: text and SVG.

use std::fmt::Write;

use crate::{
    Axis, Coord, Direction, MultiSlice,
    assign::{Component, Physical, Placement},
    cost::Wiring,
};

/// What to draw.
#[derive(Clone, Copy, Debug)]
pub struct Drawing<'a> {
    job: &'a MultiSlice,
    mesh: Option<(&'a Placement, &'a [String])>,
}

/// One colour a logical axis: readable on white, apart also for the colour-blind (the palette of
/// Okabe and Ito).
const PALETTE: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6000",
];
const GREY: &str = "#9aa0a6";

/// Pixels from chip to chip.
const PITCH: f64 = 56.0;
/// Half of a chip's side.
const HALF: f64 = 17.0;
/// Around a plane.
const MARGIN: f64 = 44.0;
/// Height of a line of the legend.
const LINE: f64 = 20.0;
/// Widest row of planes.
const MAX_WIDTH: f64 = 1400.0;

impl<'a> Drawing<'a> {
    /// A slice without a mesh.
    pub const fn slice(job: &'a MultiSlice) -> Self {
        Drawing { job, mesh: None }
    }

    /// A mesh with the names of its axes on its slice.
    pub const fn mesh(job: &'a MultiSlice, placement: &'a Placement, names: &'a [String]) -> Self {
        Drawing {
            job,
            mesh: Some((placement, names)),
        }
    }

    /// One line about the topology.
    fn title(&self) -> String {
        let slice = self.job.slice();
        let spec = slice.generation().spec();
        let wraps: Vec<_> = Axis::ALL
            .into_iter()
            .filter(|axis| slice.wrap()[axis.index()])
            .map(|axis| axis.to_string())
            .collect();
        let wraps = match (wraps.is_empty(), slice.is_twisted()) {
            (true, _) => "no wrap".to_owned(),
            (_, false) => format!("wraps {}", wraps.join(", ")),
            (_, true) => format!("wraps {}, twisted", wraps.join(", ")),
        };
        let plural =
            |count: u32, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
        let slices = match self.job.slices() {
            1 => String::new(),
            count => format!("{}, each ", plural(count, "slice")),
        };
        format!(
            "{}: {slices}{}, {}, {}; {wraps}; ICI {:.0} GB/s a link and way, DCN {:.0} Gbit/s a host",
            self.job,
            plural(slice.chips(), "chip"),
            plural(slice.device_count(), "device"),
            plural(slice.hosts(), "host"),
            spec.link_bandwidth / 1e9,
            self.job.dcn_bandwidth_per_host() * 8.0 / 1e9,
        )
    }

    /// One line an axis: what it lies on and what its traffic takes.
    fn legend(&self) -> Vec<String> {
        let Some((placement, names)) = self.mesh else {
            return Vec::new();
        };
        let mut lines = Vec::new();
        for (index, axis) in placement.axes.iter().enumerate() {
            let parts: Vec<_> = axis.components.iter().map(describe).collect();
            let lies = if parts.is_empty() {
                "nothing".to_owned()
            } else {
                parts.join(" · ")
            };
            let ring = if axis.is_ring && axis.size > 1 {
                "; ring of neighbours"
            } else {
                ""
            };
            let mut line = format!("{}={} on {lies}{ring}", name(names, index), axis.size);
            for time in placement
                .times
                .iter()
                .filter(|time| time.traffic.axis == index)
            {
                let traffic = time.traffic;
                let _ = write!(
                    line,
                    "; {} {} {}",
                    traffic.collective,
                    bytes(traffic.bytes),
                    duration(time.seconds)
                );
            }
            lines.push(line);
        }
        lines
    }

    /// What stands in a chip: its place in the mesh, for the device 0; without mesh its rank.
    fn labels(&self) -> Vec<String> {
        let slice = self.job.slice();
        let shape = slice.shape();
        let devices = self.job.devices();
        let mut labels = vec![String::new(); shape.chips() as usize];
        match self.mesh {
            None => {
                for (rank, device) in devices.iter().enumerate() {
                    if device.slice == 0 && device.core == 0 {
                        labels[shape.chip(device.coords).index()] = rank.to_string();
                    }
                }
            }
            Some((placement, _)) => {
                for (place, &rank) in placement.ranks.iter().enumerate() {
                    let device = devices[rank as usize];
                    if device.slice == 0 && device.core == 0 {
                        labels[shape.chip(device.coords).index()] =
                            indices(place, &placement.shape);
                    }
                }
            }
        }
        labels
    }

    /// The logical axis along which a link leads: of the parts of its physical axis whose
    /// digit differs between the ends the outermost.
    fn axis_of_link(&self, from: Coord, direction: Direction) -> Option<(usize, bool)> {
        let (placement, _) = self.mesh?;
        let extent = self.job.slice().shape().extents()[direction.axis.index()];
        let here = from.get(direction.axis);
        let there = (here + 1) % extent;
        let mut outermost: Option<(u32, usize)> = None;
        for (logical, axis) in placement.axes.iter().enumerate() {
            for part in &axis.components {
                let along = part.physical == Physical::Torus(direction.axis);
                let digit = |at: u32| at / part.stride % part.size;
                if along
                    && digit(here) != digit(there)
                    && outermost.is_none_or(|(stride, _)| part.stride > stride)
                {
                    outermost = Some((part.stride, logical));
                }
            }
        }
        outermost.map(|(stride, logical)| (logical, stride > 1))
    }

    /// The slice as text: a grid a plane, and below each axis's ring through the first rank.
    pub fn text(&self) -> String {
        let mut out = self.title();
        out.push('\n');
        for line in self.legend() {
            let _ = writeln!(out, "  {line}");
        }
        let shape = self.job.slice().shape();
        let [width, height, depth] = shape.extents();
        let labels = self.labels();
        let column = labels.iter().map(String::len).max().unwrap_or(0) + 2;
        for z in 0..depth {
            let _ = match shape.dimensions() {
                2 => writeln!(out, "\n x right, y down"),
                _ => writeln!(out, "\n z = {z} (x right, y down)"),
            };
            for y in 0..height {
                for x in 0..width {
                    let label = &labels[shape.chip(Coord([x, y, z])).index()];
                    let _ = write!(out, "{label:>column$}");
                }
                out.push('\n');
            }
        }
        if let Some((placement, names)) = self.mesh {
            out.push('\n');
            let devices = self.job.devices();
            for (index, axis) in placement
                .axes
                .iter()
                .enumerate()
                .filter(|(_, a)| a.size > 1)
            {
                const SHOWN: usize = 16;
                let stride: usize = placement.shape[index + 1..]
                    .iter()
                    .map(|&size| size as usize)
                    .product();
                let chips: Vec<_> = (0..axis.size as usize)
                    .take(SHOWN)
                    .map(|at| {
                        let device = devices[placement.ranks[at * stride] as usize];
                        let mut text = device.coords.to_string();
                        if self.job.slice().devices_per_chip() > 1 {
                            let _ = write!(text, ".{}", device.core);
                        }
                        if self.job.slices() > 1 {
                            let _ = write!(text, "@{}", device.slice);
                        }
                        text
                    })
                    .collect();
                let more = if axis.size as usize > SHOWN {
                    " ..."
                } else {
                    ""
                };
                let close = if axis.is_ring && axis.size > 2 {
                    " and back"
                } else {
                    ""
                };
                let _ = writeln!(
                    out,
                    "  {} from rank {}: {}{more}{close}",
                    name(names, index),
                    placement.ranks[0],
                    chips.join(" ")
                );
            }
            let total = duration(placement.seconds);
            let _ = writeln!(out, "  all traffic, one after the other: {total}");
        }
        out
    }

    /// The slice as SVG: a grid a plane, links in the colour of the logical axis that they serve.
    ///
    /// Links that groups share (parts at a distance) are dashed; those through the first
    /// rank are thick. Links that close an axis end in a dot; links along z leave a chip
    /// towards its upper right.
    pub fn svg(&self) -> String {
        let slice = self.job.slice();
        let shape = slice.shape();
        let [width, height, depth] = shape.extents();
        let plane_width = f64::from(width) * PITCH + MARGIN;
        let plane_height = f64::from(height) * PITCH + MARGIN;
        let columns = ((MAX_WIDTH / plane_width) as u32).clamp(1, depth);
        let rows = depth.div_ceil(columns);
        let legend = self.legend();
        let top = 16.0 + LINE * (legend.len() as f64 + 2.0);
        let title = self.title();
        let text_width = title.chars().count().max(
            legend
                .iter()
                .map(|line| line.chars().count() + 4)
                .max()
                .unwrap_or(0),
        );
        let total_width =
            (f64::from(columns) * plane_width + MARGIN).max(text_width as f64 * 7.3 + 32.0);
        let total_height = top + f64::from(rows) * plane_height + MARGIN / 2.0;

        let mut out = String::new();
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{total_width:.0}\" \
             height=\"{total_height:.0}\" viewBox=\"0 0 {total_width:.0} {total_height:.0}\" \
             font-family=\"sans-serif\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"16\" y=\"24\" font-size=\"14\" font-weight=\"bold\">{}</text>\n",
            escape(&title)
        );
        for (index, line) in legend.iter().enumerate() {
            let y = 24.0 + LINE * (index as f64 + 1.0);
            let colour = PALETTE[index % PALETTE.len()];
            let _ = writeln!(
                out,
                "<line x1=\"16\" y1=\"{:.0}\" x2=\"36\" y2=\"{:.0}\" stroke=\"{colour}\" \
                 stroke-width=\"5\"/><text x=\"44\" y=\"{y:.0}\" font-size=\"13\">{}</text>",
                y - 4.0,
                y - 4.0,
                escape(line)
            );
        }
        if !legend.is_empty() {
            let y = 24.0 + LINE * (legend.len() as f64 + 1.0);
            let _ = writeln!(
                out,
                "<text x=\"16\" y=\"{y:.0}\" font-size=\"12\" fill=\"#5f6368\">in a chip: its \
                 place in the mesh; thick: the groups of the first; dashed: shared by groups; \
                 dot: closes the axis; grey boxes: hosts</text>"
            );
        }

        let position = |coord: Coord| {
            let [x, y, z] = coord.0;
            (
                MARGIN + f64::from(z % columns) * plane_width + (f64::from(x) + 0.5) * PITCH,
                top + f64::from(z / columns) * plane_height + (f64::from(y) + 0.5) * PITCH + 14.0,
            )
        };
        self.svg_planes(&mut out, position);
        let first = self.first_groups();
        for coord in shape.coords() {
            for direction in Direction::ALL
                .into_iter()
                .filter(|direction| direction.positive)
            {
                self.svg_link(&mut out, coord, direction, &position, &first);
            }
        }
        let labels = self.labels();
        for coord in shape.coords() {
            let (x, y) = position(coord);
            let label = &labels[shape.chip(coord).index()];
            let size = if label.len() <= 5 {
                11.0
            } else {
                11.0 * 5.5 / label.len() as f64
            };
            let _ = writeln!(
                out,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.0}\" height=\"{:.0}\" rx=\"4\" \
                 fill=\"white\" stroke=\"#3c4043\"/><text x=\"{x:.1}\" y=\"{:.1}\" \
                 font-size=\"{size:.1}\" text-anchor=\"middle\">{label}</text>",
                x - HALF,
                y - HALF,
                2.0 * HALF,
                2.0 * HALF,
                y + 4.0,
            );
        }
        out.push_str("</svg>\n");
        out
    }

    /// Headings of the planes and boxes around the chips of a host.
    fn svg_planes(&self, out: &mut String, position: impl Fn(Coord) -> (f64, f64)) {
        let slice = self.job.slice();
        let shape = slice.shape();
        if shape.dimensions() == 3 {
            for z in 0..shape.extents()[2] {
                let (x, y) = position(Coord([0, 0, z]));
                let _ = writeln!(
                    out,
                    "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"12\" fill=\"#5f6368\">z = {z}</text>",
                    x + 8.0,
                    y - PITCH / 2.0 - 6.0
                );
            }
        }
        let [across, down, _] = slice.chips_per_host();
        for coord in shape.coords() {
            let [x, y, _] = coord.0;
            if x % across == 0 && y % down == 0 {
                let (x, y) = position(coord);
                let _ = writeln!(
                    out,
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"8\" \
                     fill=\"#f1f3f4\"/>",
                    x - PITCH / 2.0 + 3.0,
                    y - PITCH / 2.0 + 3.0,
                    f64::from(across) * PITCH - 6.0,
                    f64::from(down) * PITCH - 6.0,
                );
            }
        }
    }

    /// For each logical axis the chips of the group through the first rank.
    fn first_groups(&self) -> Vec<Vec<Coord>> {
        let Some((placement, _)) = self.mesh else {
            return Vec::new();
        };
        let devices = self.job.devices();
        (0..placement.shape.len())
            .map(|axis| {
                let stride: usize = placement.shape[axis + 1..]
                    .iter()
                    .map(|&size| size as usize)
                    .product();
                (0..placement.shape[axis] as usize)
                    .map(|at| devices[placement.ranks[at * stride] as usize])
                    .filter(|device| device.slice == 0)
                    .map(|device| device.coords)
                    .collect()
            })
            .collect()
    }

    fn svg_link(
        &self,
        out: &mut String,
        from: Coord,
        direction: Direction,
        position: &impl Fn(Coord) -> (f64, f64),
        first: &[Vec<Coord>],
    ) {
        let Some(to) = self.job.slice().torus().neighbour(from, direction) else {
            return;
        };
        let served = self.axis_of_link(from, direction);
        let colour = served.map_or(GREY, |(axis, _)| PALETTE[axis % PALETTE.len()]);
        let dash = if served.is_some_and(|(_, shared)| shared) {
            " stroke-dasharray=\"4 3\""
        } else {
            ""
        };
        let thick = served.is_some_and(|(axis, shared)| {
            !shared && first[axis].contains(&from) && first[axis].contains(&to)
        });
        let stroke = if thick { 5.0 } else { 2.0 };
        let mut line = |x1: f64, y1: f64, x2: f64, y2: f64, dot: bool| {
            let _ = writeln!(
                out,
                "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" \
                 stroke=\"{colour}\" stroke-width=\"{stroke}\"{dash}/>"
            );
            if dot {
                let _ = writeln!(
                    out,
                    "<circle cx=\"{x2:.1}\" cy=\"{y2:.1}\" r=\"3\" fill=\"{colour}\"/>"
                );
            }
        };
        let ((x1, y1), (x2, y2)) = (position(from), position(to));
        let closes = from.get(direction.axis) + 1 != to.get(direction.axis);
        let (dx, dy) = match direction.axis {
            Axis::X => (1.0, 0.0),
            Axis::Y => (0.0, 1.0),
            Axis::Z => {
                // Half of the way is drawn at either end.
                let (near, far) = (HALF - 2.0, PITCH / 2.0 - 2.0);
                line(x1 + near, y1 - near, x1 + far, y1 - far, closes);
                line(x2 - near, y2 + near, x2 - far, y2 + far, closes);
                return;
            }
        };
        if closes {
            let reach = PITCH / 2.0 + 8.0;
            line(x1, y1, x1 + dx * reach, y1 + dy * reach, true);
            line(x2, y2, x2 - dx * reach, y2 - dy * reach, true);
        } else {
            line(x1, y1, x2, y2, false);
        }
    }
}

/// A component as `x 4 ring`, `y 2 line at distance 4`, `dcn 2`.
fn describe(part: &Component) -> String {
    let mut text = format!("{} {}", part.physical, part.size);
    match part.wiring {
        Wiring::Ring => text.push_str(" ring"),
        Wiring::Line if part.physical != Physical::Core => text.push_str(" line"),
        _ => {}
    }
    if part.stride > 1 {
        let _ = write!(text, " at distance {}", part.stride);
    }
    text
}

/// The indices of a place in the mesh, as `3,1`.
fn indices(mut place: usize, shape: &[u32]) -> String {
    let mut parts: Vec<String> = shape
        .iter()
        .rev()
        .map(|&size| {
            let index = place % size as usize;
            place /= size as usize;
            index.to_string()
        })
        .collect();
    parts.reverse();
    parts.join(",")
}

fn name(names: &[String], index: usize) -> String {
    names
        .get(index)
        .cloned()
        .unwrap_or_else(|| format!("axis {index}"))
}

/// Bytes in binary units, as `64 MiB`.
pub fn bytes(count: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value.fract() == 0.0 || value >= 100.0 {
        0
    } else {
        1
    };
    format!("{value:.digits$} {}", units[unit])
}

/// Seconds with three digits, as `1.23 ms`.
pub fn duration(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "us"),
    };
    let digits = match value {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
