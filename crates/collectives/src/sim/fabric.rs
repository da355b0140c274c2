use std::sync::Arc;

use tpu_dist_mesh::cost::{self, Dimension};
use tpu_dist_mesh::{Channel, ChannelId, Fabric};

use super::{Network, Unroutable};
use crate::Kind;
use crate::algorithm::{
    Algorithm, Bucket, Colour, Direct, HalvingDoubling, Hierarchical, Reordered,
};
use crate::schedule::{Pieces, Request};

/// The links of TPU slices and of the data-center network between them. Ranks are the fabric's.
pub struct FabricNetwork<'a> {
    fabric: &'a Fabric,
    channels: Vec<Channel>,
}

impl<'a> FabricNetwork<'a> {
    /// All channels of `fabric`.
    pub fn new(fabric: &'a Fabric) -> FabricNetwork<'a> {
        let ids = (0..fabric.channels() as u32).map(ChannelId);
        FabricNetwork {
            fabric,
            channels: ids.map(|id| fabric.channel(id)).collect(),
        }
    }

    /// What to play for an all-reduce of `count` elements over all ranks, one program for each
    /// colour: the devices of a chip share it, a [`Bucket`] goes through each slice, and
    /// slices halve and double between them. XLA does the same on one slice, by the compiled
    /// programs of libtpu 0.0.52.
    ///
    /// On a torus of unequal sides colours that do not wait for one another would meet on the
    /// links. Where all axes close and chips have one device, one program keeps them in step; or
    /// two, one each way round, go through the axes in turn, where that is faster
    /// ([`cost::rotates`]).
    pub fn all_reduce(&self, count: u64, element_size: u32) -> Vec<(Arc<dyn Algorithm>, Request)> {
        let job = self.fabric.job();
        let sides = job.slice().shape().extents();
        let slices = job.slices();
        let chips = self.chips();
        let mut colours = Bucket::new(sides).colours().to_vec();
        let axes = || (0..3).filter(|&axis| sides[axis] > 1);
        let closed = axes().all(|axis| job.slice().wrap()[axis]);
        let equal = axes().all(|axis| sides[axis] == sides[0]);
        if slices == 1 && job.slice().devices_per_chip() == 1 && closed && !equal {
            let ring =
                |axis| Dimension::ici(sides[axis], 1, true, 1, self.fabric.links().bandwidth());
            let torus: Vec<_> = axes().map(ring).collect();
            if cost::rotates(count as f64 * f64::from(element_size), &torus) {
                let all = Arc::new(Bucket::new(sides));
                let request = self.request(count, element_size);
                return vec![(Arc::new(Reordered::new(all, chips.concat())), request)];
            }
            colours.retain(|colour| colour.first == 0);
        }
        let shares = Pieces::split(count, colours.len() as u32);
        colours
            .into_iter()
            .enumerate()
            .map(|(number, colour)| {
                let within: Arc<dyn Algorithm> = match slices {
                    1 => Arc::new(Bucket::with_colours(sides, [colour])),
                    _ => Arc::new(across_slices(sides, colour, slices)),
                };
                let algorithm: Arc<dyn Algorithm> = match job.slice().devices_per_chip() {
                    1 => Arc::new(Reordered::new(within, chips.concat())),
                    _ => Arc::new(Hierarchical::new(chips.clone(), Arc::new(Direct), within)),
                };
                (
                    algorithm,
                    self.request(shares.count(number as u32), element_size),
                )
            })
            .collect()
    }

    fn request(&self, count: u64, element_size: u32) -> Request {
        Request {
            kind: Kind::AllReduce,
            ranks: self.fabric.ranks(),
            root: 0,
            counts: vec![count],
            element_size,
            max_message: u64::MAX,
        }
    }

    /// The ranks of each chip, slice after slice, x fastest.
    fn chips(&self) -> Vec<Vec<u32>> {
        let job = self.fabric.job();
        let shape = job.slice().shape();
        let mut chips = vec![Vec::new(); (shape.chips() * job.slices()) as usize];
        for (rank, device) in self.fabric.devices().iter().enumerate() {
            let chip = shape.chips() * device.slice + shape.chip(device.coords).0;
            chips[chip as usize].push(rank as u32);
        }
        chips
    }
}

/// One colour of a bucket in each slice of chips, and an all-reduce between the chips that
/// stand at the same place of their slices.
fn across_slices(sides: [u32; 3], colour: Colour, slices: u32) -> Hierarchical {
    // The dimension that the colour begins with is the slowest, so that what is left of the data
    // after each dimension is in one run.
    let order = [2, 1, 0].map(|offset| (colour.first + offset) % 3);
    let strides = [1, sides[0], sides[0] * sides[1]];
    let chips = sides.iter().product::<u32>();
    let groups: Vec<Vec<u32>> = (0..slices)
        .map(|slice| {
            let mut group = Vec::with_capacity(chips as usize);
            for slow in 0..sides[order[2]] {
                for middle in 0..sides[order[1]] {
                    for fast in 0..sides[order[0]] {
                        group.push(
                            slice * chips
                                + slow * strides[order[2]]
                                + middle * strides[order[1]]
                                + fast * strides[order[0]],
                        );
                    }
                }
            }
            group
        })
        .collect();
    let inner = Bucket::with_colours(
        order.map(|dimension| sides[dimension]),
        [Colour { first: 2, ..colour }],
    );
    Hierarchical::new(groups, Arc::new(inner), Arc::new(HalvingDoubling))
}

impl Network for FabricNetwork<'_> {
    fn ranks(&self) -> u32 {
        self.fabric.ranks()
    }

    fn links(&self) -> usize {
        self.channels.len()
    }

    fn bandwidth(&self, link: usize) -> f64 {
        self.channels[link].bandwidth
    }

    fn latency(&self, link: usize) -> f64 {
        self.channels[link].latency
    }

    fn startup(&self, from: u32, to: u32) -> f64 {
        self.fabric.startup(from, to)
    }

    fn route(&self, from: u32, to: u32, links: &mut Vec<u32>) -> Result<(), Unroutable> {
        let route = self.fabric.route(from, to);
        let route = route.map_err(|error| Unroutable {
            from,
            to,
            reason: error.to_string(),
        })?;
        links.extend(route.into_iter().map(|channel| channel.0));
        Ok(())
    }
}
