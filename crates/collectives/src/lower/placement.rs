use tpu_dist_mesh::{Device, Generation, MultiSlice, Slice};

use super::{Grid, LowerError};

/// On which devices the programs of a group run, and as which partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// libtpu's id of each partition's device: the device assignment.
    pub devices: Vec<u32>,
    /// The groups of partitions.
    pub groups: Vec<Vec<u32>>,
    /// How the ranks of each group stand on the torus, where they fill a box.
    pub grid: Option<Grid>,
    /// Whether libtpu has no reductions for these groups, so that data must be gathered and reduced
    /// by each rank: groups that fill no box, with limited connectivity. Nor has it a
    /// [`ragged_all_to_all`](super::ragged_all_to_all) for any group there.
    pub gathered: bool,
}

impl Placement {
    /// For one group; ranks are positions in [`MultiSlice::devices`]. Only its members take part
    /// where libtpu compiles that (see [`takes_members`]). Elsewhere all ranks of the job must
    /// run the program: it has as many groups as needed, the others filled in rank order.
    ///
    /// # Errors
    /// For ranks that repeat or do not exist, and where the job cannot be cut into groups of this
    /// size.
    pub fn new(job: &MultiSlice, members: &[u32]) -> Result<Placement, LowerError> {
        let devices = job.devices();
        let found = find(&devices, members)?;
        if takes_members(job, &found) {
            return Ok(Placement {
                devices: found.iter().map(|device| device.id).collect(),
                groups: vec![(0..members.len() as u32).collect()],
                gathered: is_gathered(job, &found),
                grid: grid(&[found]),
            });
        }
        if !devices.len().is_multiple_of(members.len()) {
            return Err(LowerError::Groups(format!(
                "expected a size that divides the {} ranks of {job}, got {}: libtpu compiles no \
                 program for these members alone",
                devices.len(),
                members.len()
            )));
        }
        let rest: Vec<u32> = (0..devices.len() as u32)
            .filter(|rank| !members.contains(rank))
            .collect();
        let mut groups = vec![members.to_vec()];
        groups.extend(rest.chunks(members.len()).map(<[u32]>::to_vec));
        Placement::world(job, &groups)
    }

    /// For groups that together are all ranks of the job, each doing the same at once, as the groups
    /// along an axis of a mesh do.
    ///
    /// # Errors
    /// For ranks that repeat or do not exist.
    pub fn world(job: &MultiSlice, groups: &[Vec<u32>]) -> Result<Placement, LowerError> {
        let devices = job.devices();
        let found: Vec<Vec<&Device>> = groups
            .iter()
            .map(|group| find(&devices, group))
            .collect::<Result<_, _>>()?;
        Ok(Placement {
            devices: devices.iter().map(|device| device.id).collect(),
            groups: groups.to_vec(),
            gathered: found.iter().any(|group| is_gathered(job, group)),
            grid: grid(&found),
        })
    }

    /// Whether only some of the job's devices take part.
    pub fn is_partial(&self, job: &MultiSlice) -> bool {
        self.devices.len() < job.device_count() as usize
    }
}

fn find<'a>(devices: &'a [Device], ranks: &[u32]) -> Result<Vec<&'a Device>, LowerError> {
    let mut seen = vec![false; devices.len()];
    let found: Vec<&Device> = ranks
        .iter()
        .map(|&rank| match seen.get_mut(rank as usize) {
            Some(seen) if !*seen => {
                *seen = true;
                Ok(&devices[rank as usize])
            }
            _ => Err(LowerError::Groups(format!(
                "rank {rank} repeats or is not below {}",
                devices.len()
            ))),
        })
        .collect::<Result<_, _>>()?;
    if found.is_empty() {
        return Err(LowerError::Groups(
            "expected at least one rank, got none".to_owned(),
        ));
    }
    Ok(found)
}

/// Whether libtpu 0.0.52 compiles a program for these devices alone, as its compiler was found to do.
///
/// - All devices of a slice: yes.
/// - A box of chips away from the origin is a slice of its own to libtpu: within the bounds of one host,
///   or whole hosts along every axis.
/// - A box at the origin: on v4, v5p and tpu7x; on v5e and v6e where its ids are the first ones.
/// - Other sets: yes. But with limited connectivity (v5e from 4x8 up) only boxes away from the
///   origin.
///
/// Sets that this says no to may compile all the same; a program for all devices does.
fn takes_members(job: &MultiSlice, members: &[&Device]) -> bool {
    if members.len() == job.device_count() as usize {
        return true;
    }
    if job.slices() > 1 {
        return false;
    }
    let slice = job.slice();
    let limited = slice.has_limited_ici();
    let Some((origin, sides)) = chips(members) else {
        return !limited;
    };
    let whole = members.len() as u32 == sides.iter().product::<u32>() * slice.devices_per_chip();
    if origin != [0; 3] {
        return whole && is_subslice(slice, sides);
    }
    match slice.generation() {
        Generation::V5e | Generation::V6e => {
            !limited
                && members
                    .iter()
                    .all(|device| device.id < members.len() as u32)
        }
        _ => whole,
    }
}

fn is_gathered(job: &MultiSlice, group: &[&Device]) -> bool {
    job.slice().has_limited_ici() && group.len() > 1 && chips(group).is_none()
}

fn is_subslice(slice: &Slice, sides: [u32; 3]) -> bool {
    let host = slice.chips_per_host();
    let all = |fits: fn(u32, u32) -> bool| (0..3).all(|axis| fits(sides[axis], host[axis]));
    all(|side, host| side <= host) || all(|side, host| side.is_multiple_of(host))
}

/// The lowest corner and the sides of the box that the chips of some devices fill.
fn chips(devices: &[&Device]) -> Option<([u32; 3], [u32; 3])> {
    let along = |axis: usize| devices.iter().map(move |device| device.coords.0[axis]);
    let low = [0, 1, 2].map(|axis| along(axis).min().unwrap_or(0));
    let sides = [0, 1, 2].map(|axis| along(axis).max().unwrap_or(0) - low[axis] + 1);
    let mut chips: Vec<_> = devices.iter().map(|device| device.coords).collect();
    chips.sort_unstable();
    chips.dedup();
    (chips.len() as u32 == sides.iter().product::<u32>()).then_some((low, sides))
}

/// The box that the devices of each group fill in the same order.
fn grid(groups: &[Vec<&Device>]) -> Option<Grid> {
    let grids = groups.iter().map(|group| box_of(group));
    let mut grids = grids.collect::<Option<Vec<Grid>>>()?;
    grids.dedup();
    match grids.len() {
        1 => grids.pop(),
        _ => None,
    }
}

fn box_of(group: &[&Device]) -> Option<Grid> {
    let place = |device: &Device| {
        let [x, y, z] = device.coords.0;
        [device.core, x, y, z, device.slice]
    };
    let mut sides = Vec::new();
    for axis in 0..5 {
        let mut along: Vec<u32> = group.iter().map(|device| place(device)[axis]).collect();
        along.sort_unstable();
        along.dedup();
        sides.push(along.len() as u32);
    }
    if sides.iter().product::<u32>() as usize != group.len() {
        return None;
    }
    sides.retain(|&side| side > 1);
    // One dimension is a group like any other.
    if sides.len() < 2 {
        return None;
    }
    let mut order: Vec<u32> = (0..group.len() as u32).collect();
    order.sort_by_key(|&rank| {
        let mut place = place(group[rank as usize]);
        place.reverse();
        place
    });
    Some(Grid::ordered(sides, order))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_placed_alone_or_in_the_world() {
        for (name, members, alone) in [
            ("v5p:4x4x4", vec![0, 7, 21], true),
            ("v5p:4x4x4", vec![0, 1, 4, 5], true),
            // Rank 8 begins the second row of hosts: a line of four chips there is no slice.
            ("v5p:4x4x4", vec![8, 9, 12, 13], false),
            ("v6e:4x4", vec![0, 1, 2, 3], false),
            ("v6e:4x4", vec![4, 5, 6, 7], true),
            ("v6e:4x4", vec![0, 1, 4, 5], true),
            ("v5e:4x8", vec![4, 5, 6, 7], true),
            ("v5e:4x8", vec![0, 13], false),
            ("v5e:4x8", (0..32).collect(), true),
            ("2*v5e:2x2", vec![0, 4], false),
        ] {
            let job: MultiSlice = name.parse().expect("legal");
            let placement = Placement::new(&job, &members).expect("divides");
            let what = format!("{name} {members:?}: {placement:?}");
            let partial = members.len() < job.device_count() as usize;
            assert_eq!(placement.is_partial(&job), alone && partial, "{what}");
            // Members are group 0, in their order.
            let devices = job.devices();
            let ids = placement.groups[0]
                .iter()
                .map(|&p| placement.devices[p as usize]);
            let expected = members.iter().map(|&rank| devices[rank as usize].id);
            assert!(ids.eq(expected), "{what}");
            let mut all = placement.groups.concat();
            all.sort_unstable();
            assert!(
                all.into_iter().eq(0..placement.devices.len() as u32),
                "{what}"
            );
        }
        let job: MultiSlice = "v5e:4x8".parse().expect("legal");
        for (members, gathered) in [(vec![0, 13], true), (vec![0, 1, 4, 5], false)] {
            let placement = Placement::new(&job, &members).expect("divides");
            assert_eq!(placement.gathered, gathered, "{members:?}");
        }
        for (members, words) in [
            (vec![0, 13, 29], "expected a size that divides the 32 ranks"),
            (vec![0, 0], "rank 0 repeats"),
            (vec![32], "not below 32"),
            (vec![], "at least one rank"),
        ] {
            let error = Placement::new(&job, &members).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn boxes_are_grids() {
        let job: MultiSlice = "v6e:4x4".parse().expect("legal");
        let all: Vec<u32> = (0..16).collect();
        let world = Placement::world(&job, &[all]).expect("covers");
        // Hosts of 2x2 chips: the first row is the first two ranks of two hosts.
        let grid = world.grid.expect("a box");
        assert_eq!(grid.sides(), [4, 4]);
        assert_eq!(grid.order()[..4], [0, 1, 4, 5]);
        let scattered = Placement::world(&job, &[vec![0, 3, 9, 14]]).expect("distinct");
        assert_eq!(scattered.grid, None);
        let rows = Placement::world(&job, &[vec![0, 1, 4, 5]]).expect("distinct");
        assert_eq!(rows.grid, None);
    }
}
