// Rotate the hue of pixels, with the same results as Pillow's conversions to HSV and back (Convert.c).
//
// Pillow computes some values with 64 bits. These formulas use 32 bits and give the same results for all 2^24 colors
// and all 256 shifts, as `python -m tools.transform_campaign hues` shows.

#include "edit.h"

// The value of a color channel: the highest in two of the six sectors, the middle one in two, and the lowest in two.
static inline int32_t pick(int32_t sector, int high_1, int high_2, int between_1, int between_2, int32_t high,
                           int32_t between, int32_t low) {
    bool is_high = (sector == high_1) | (sector == high_2), is_between = (sector == between_1) | (sector == between_2);
    return is_high ? high : is_between ? between : low;
}

// Add a number to the hue of pixels, in units of 1/256 of the circle, as in Pillow.
void turn_hue(Block *block, int64_t count, int32_t shift) {
    uint8_t *restrict reds = block->colors[0], *restrict greens = block->colors[1], *restrict blues = block->colors[2];
    for (int64_t i = 0; i < count; i++) {
        int32_t red = reds[i], green = greens[i], blue = blues[i];
        int32_t high = red > green ? red : green, low = red < green ? red : green;
        high = high > blue ? high : blue;
        low = low < blue ? low : blue;
        int32_t span = high - low, middle = red + green + blue - high - low;
        // To HSV. Hue and saturation are bytes, and the value is the highest channel.
        float part = (float)(high - middle) / (float)(span > 1 ? span : 1);
        bool is_red = red == high, is_green = green == high;
        bool grows = is_red ? green < blue : is_green ? blue < red : red <= green;
        float start = is_red ? (grows ? -1.0f : 1.0f) : is_green ? (grows ? 1.0f : 3.0f) : (grows ? 3.0f : 5.0f);
        float turn = (start + (grows ? part : -part)) / 6.0f;
        turn = turn < 0 ? turn + 1.0f : turn;
        int32_t hue = span == 0 ? 0 : (int32_t)(turn * 255.0f);
        int32_t saturation = (int32_t)((float)span / (float)(high > 1 ? high : 1) * 255.0f);
        hue = (hue + shift) & 255;
        // Back to RGB: the channels have the highest value, the lowest, and one between them.
        int32_t six = hue * 6, sector = (six * 257 + 257) >> 16, rest = six - sector * 255;
        int32_t weight = sector & 1 ? rest : 255 - rest;
        low = high * (255 - saturation) + 128;
        low = (low + (low >> 8)) >> 8;
        int32_t between = (int32_t)((float)(high * (65025 - saturation * weight)) * (float)(1 / 65025.0) + 0.5f);
        sector = sector == 6 ? 0 : sector;
        reds[i] = (uint8_t)pick(sector, 0, 5, 1, 4, high, between, low);
        greens[i] = (uint8_t)pick(sector, 1, 2, 0, 3, high, between, low);
        blues[i] = (uint8_t)pick(sector, 3, 4, 2, 5, high, between, low);
    }
}
